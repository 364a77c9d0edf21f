"""What `lmm-r1 init` writes next to the rows; each file is copied unchanged."""
