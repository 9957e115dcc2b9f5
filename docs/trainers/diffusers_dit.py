"""Diffusers' DiT, as `diffusers_unet.py` trains a U-Net.

python docs/trainers/diffusers_dit.py 60MiB
"""

from __future__ import annotations

from functools import partial

from diffusers_unet import train as train_any
from tiny import run

train = partial(train_any, kind="dit")

if __name__ == "__main__":
    run(train)
