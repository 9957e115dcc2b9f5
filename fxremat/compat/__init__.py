"""Every private torch name that fxremat uses, for torch 2.11, 2.13 and 2.15.

The one place where versions differ; users say ``compat.name``. By theme:

- `configuration`, `sizes`, `dynamo`, `tensors`, `backward`, `measuring`: what torch is set to and
  is doing, symbolic sizes, tensors without memory, autograd, the profiler;
- `joint_graph`, `partitioning`, `donation`: the graph that we plan, how it is cut in two, and what
  its backward may write over;
- `logs`: names in torch's logs, and what it writes of a compilation;
- `compilers`, `post_grad`, `scheduling`: Inductor on its way from a graph to kernels;
- `generated_code`, `loading`, `kernels`: the code that Inductor writes, run with and without its
  kernels;
- `kernels_ahead`, `kernels_together`, `lowered_ahead`: what of it is done before Inductor's
  compiler comes to it.

Each name has a test in ``tests/test_compat_<theme>.py``.
"""

from __future__ import annotations

from fxremat.compat.absent.autocast import cuda_autocast
from fxremat.compat.absent.cubins import cubins
from fxremat.compat.absent.moving import with_numbers
from fxremat.compat.absent.pretending import CUDA, Properties, fake_cuda, has_triton
from fxremat.compat.absent.tracing import apart_from_tracing, generating, trace_for_absent
from fxremat.compat.backward import (
    accumulators_of,
    at_end_of_backward,
    hooks_on,
    hooks_on_node,
    leaves_of_one_edge,
    leaves_of_one_node,
    leaves_of_this_node,
    no_other_backward,
    running_backward,
    running_node,
    watch_backwards,
)
from fxremat.compat.call_stack import calling_modules, with_stack_room
from fxremat.compat.compilers import (
    compile_with_aot_eager,
    compile_with_inductor,
    joint_passes,
    trace_as_inductor,
)
from fxremat.compat.configuration import (
    CUDAGRAPHS,
    PARTITIONER,
    POST_GRAD_PASS,
    SCHEDULER_PASS,
    CustomGraphPass,
    CustomPartitionerFn,
    OpOverload,
    SchedulerPass,
    cache_directory,
    caches_disabled,
    chain_passes,
    functorch_config,
    inductor_config,
    inductor_patches,
)
from fxremat.compat.donation import (
    donatable,
    donate,
    donated_inputs,
    name_in_forward,
    only_marked_buffers_donated,
)
from fxremat.compat.dynamo import (
    checkpointed_regions,
    compile_in_training,
    compile_parts,
    compiled_in_place,
    compiled_parts,
    current_compilation,
    fresh_dynamo_caches,
    inline_regions,
    is_whole_call,
    mark_dynamic,
    more_follow,
    splits_for_ddp,
    unwrapped,
)
from fxremat.compat.inductor.generated_code import Generated, code_key, generate
from fxremat.compat.inductor.kernels import (
    apart,
    begin_kernel,
    compile_kernel,
    decomposed,
    for_a_kernel,
    unbuilt_kernel,
)
from fxremat.compat.inductor.kernels_ahead import (
    begin_kernels,
    look_for_vectors,
    wait_for_vectors,
)
from fxremat.compat.inductor.loading import load_without_kernels
from fxremat.compat.inductor.lowered_ahead import forget_lowered, hand_over
from fxremat.compat.inductor.post_grad import (
    copy_images,
    is_noop_to_inductor,
    is_read_as_an_image,
    leave_layouts,
    prefers_channels_last,
    return_inputs_as_they_are,
    write_results,
)
from fxremat.compat.inductor.scheduling import (
    Footprint,
    Scheduled,
    in_waiting_order,
    names_being_scheduled,
    run_after,
    run_in_functions,
    scheduled,
)
from fxremat.compat.joint_graph import (
    copy_module,
    input_index,
    is_opaque,
    is_symbol,
    is_tangent,
    module_of,
    must_be_in_backward,
    must_be_in_forward,
    mutated_input_of,
    prepare_joint_graph,
    user_tag,
    without_user_tags,
)
from fxremat.compat.logs import GRAPH_LOG, PLAN_LOG, artifact_logger, trace_artifact
from fxremat.compat.measuring import (
    keep_busy,
    profiler_memory_events,
    random_state_kept,
    recorded_allocations,
)
from fxremat.compat.partitioning import extract_forward_backward, saved_names, torch_partition
from fxremat.compat.pipelining import (
    RunningPipeline,
    ShownStage,
    is_stage,
    received_by,
    running_pipeline,
    shown_stages,
)
from fxremat.compat.ranks import (
    has_within,
    is_a_rank,
    is_collective,
    job_store,
    ranks_together,
    sharded_and_gathered,
)
from fxremat.compat.sizes import (
    ShapeEnv,
    plan_for_sizes_seen,
    size_bound,
    size_ranges,
    sizes_at,
    symbols_seen,
)
from fxremat.compat.tensors import (
    Watching,
    fake_mode_of,
    fake_tensors,
    is_dtensor,
    is_fake,
    local_part,
    on_device_without_memory,
    on_host_without_memory,
    outside_fake_mode,
    places_in_joint,
    plain_tensors,
    storage_key,
    storage_watch,
    without_memory,
)
from fxremat.compat.tuning import tuned_in_the_step

__all__ = [
    "CUDA",
    "CUDAGRAPHS",
    "GRAPH_LOG",
    "PARTITIONER",
    "PLAN_LOG",
    "POST_GRAD_PASS",
    "SCHEDULER_PASS",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "Footprint",
    "Generated",
    "OpOverload",
    "Properties",
    "RunningPipeline",
    "Scheduled",
    "SchedulerPass",
    "ShapeEnv",
    "ShownStage",
    "Watching",
    "accumulators_of",
    "apart",
    "apart_from_tracing",
    "artifact_logger",
    "at_end_of_backward",
    "begin_kernel",
    "begin_kernels",
    "cache_directory",
    "caches_disabled",
    "calling_modules",
    "chain_passes",
    "checkpointed_regions",
    "code_key",
    "compile_in_training",
    "compile_kernel",
    "compile_parts",
    "compile_with_aot_eager",
    "compile_with_inductor",
    "compiled_in_place",
    "compiled_parts",
    "copy_images",
    "copy_module",
    "cubins",
    "cuda_autocast",
    "current_compilation",
    "decomposed",
    "donatable",
    "donate",
    "donated_inputs",
    "extract_forward_backward",
    "fake_cuda",
    "fake_mode_of",
    "fake_tensors",
    "for_a_kernel",
    "forget_lowered",
    "fresh_dynamo_caches",
    "functorch_config",
    "generate",
    "generating",
    "hand_over",
    "has_triton",
    "has_within",
    "hooks_on",
    "hooks_on_node",
    "in_waiting_order",
    "inductor_config",
    "inductor_patches",
    "inline_regions",
    "input_index",
    "is_a_rank",
    "is_collective",
    "is_dtensor",
    "is_fake",
    "is_noop_to_inductor",
    "is_opaque",
    "is_read_as_an_image",
    "is_stage",
    "is_symbol",
    "is_tangent",
    "is_whole_call",
    "job_store",
    "joint_passes",
    "keep_busy",
    "leave_layouts",
    "leaves_of_one_edge",
    "leaves_of_one_node",
    "leaves_of_this_node",
    "load_without_kernels",
    "local_part",
    "look_for_vectors",
    "mark_dynamic",
    "module_of",
    "more_follow",
    "must_be_in_backward",
    "must_be_in_forward",
    "mutated_input_of",
    "name_in_forward",
    "names_being_scheduled",
    "no_other_backward",
    "on_device_without_memory",
    "on_host_without_memory",
    "only_marked_buffers_donated",
    "outside_fake_mode",
    "places_in_joint",
    "plain_tensors",
    "plan_for_sizes_seen",
    "prefers_channels_last",
    "prepare_joint_graph",
    "profiler_memory_events",
    "random_state_kept",
    "ranks_together",
    "received_by",
    "recorded_allocations",
    "return_inputs_as_they_are",
    "run_after",
    "run_in_functions",
    "running_backward",
    "running_node",
    "running_pipeline",
    "saved_names",
    "scheduled",
    "sharded_and_gathered",
    "shown_stages",
    "size_bound",
    "size_ranges",
    "sizes_at",
    "splits_for_ddp",
    "storage_key",
    "storage_watch",
    "symbols_seen",
    "torch_partition",
    "trace_artifact",
    "trace_as_inductor",
    "trace_for_absent",
    "tuned_in_the_step",
    "unbuilt_kernel",
    "unwrapped",
    "user_tag",
    "wait_for_vectors",
    "watch_backwards",
    "with_numbers",
    "with_stack_room",
    "without_memory",
    "without_user_tags",
    "write_results",
]
