"""Stand-in for flash-attn: padding helpers and one collective, in plain PyTorch. No attention kernel lives here."""

__version__ = "2.8.3+cpu"
