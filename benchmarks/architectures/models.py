"""All architectures by name."""

from __future__ import annotations

from .cases import Cases
from .others import OTHERS
from .pictures import PICTURES
from .texts import TEXTS

ARCHITECTURES: Cases = {**OTHERS, **TEXTS, **PICTURES}
