"""Small kernels compiled apart from the graph around them."""

from __future__ import annotations

import torch

from fxremat.compat.configuration import POST_GRAD_PASS, inductor_config
from fxremat.compat.inductor.kernels import apart, for_a_kernel


def test_apart_from_what_is_being_compiled() -> None:
    with inductor_config.patch({POST_GRAD_PASS: print}), torch.device("cpu"):
        with for_a_kernel():
            assert inductor_config.post_grad_custom_post_pass is None
            assert type(torch.empty(1)) is not torch.Tensor
            with apart():
                assert type(torch.empty(1)) is torch.Tensor
        assert inductor_config.post_grad_custom_post_pass is print
