"""A training loop without its device: what it allocates is recorded and given to the allocator.

    recorder   real Python runs on tensors without memory; each storage that comes or goes is noted
    stand_in   a compiled model that asks for what its dry run asked for
    replay     what was noted, on the model of torch's allocator: bytes reserved in each step

Nothing here knows how a loop looks. What optimizers, ``clip_grad_norm_`` or ``GradScaler`` allocate
is what their own code asks for.
"""
