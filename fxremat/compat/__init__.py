"""Every private torch name that fxremat uses, for torch 2.11 to 2.14.

The one place where versions differ. Each module has one theme, and names are imported from there:

- `configuration`, `sizes`, `dynamo`, `tensors`, `backward`, `measuring`: what torch is set to and
  is doing, symbolic sizes, tensors without memory, autograd, the profiler;
- `joint_graph`: the graph that we plan, how it is cut in two, and what its backward may write over;
- `ranks`, `pipelining`: DDP's parts, what ranks share, and pipelines;
- `logs`: names in torch's logs, and what it writes of a compilation;
- `compilers`, `inductor`: Inductor on its way from a graph to kernels, the code that it writes, run
  with and without its kernels, and what of it is done before its compiler comes to it;
- `absent`: tracing and generating code for a device that is not here.

Each name has a test in a file ``tests/test_compat_<theme>.py``.
"""

from fxremat.compat import logs  # noqa: F401  torch imports packages to find the names of logs
