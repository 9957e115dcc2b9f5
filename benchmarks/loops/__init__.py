"""Training loops replayed without a GPU: recorded, then given to the model of the allocator.

    recorder   real Python runs on tensors without memory; each storage that comes or goes is noted
    stand_in   a compiled model that asks for what its dry run asked for
    replay     what was noted, on the model of torch's allocator: bytes reserved in each step
    judge      a planned loop beside plain compile's, and whether it keeps what was promised

Nothing here knows how a loop looks. What optimizers, ``clip_grad_norm_`` or ``GradScaler`` allocate
is what their own code asks for.
"""
