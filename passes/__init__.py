"""FX passes, one per file, imported as ``fxremat.passes``."""

if __name__ != "fxremat.passes":
    raise ImportError("import fxremat.passes, not passes")
