"""What `lmm-r1 init` writes beside the rows; each file is copied as it stands."""
