"""What is in a row file, and what of it a training would stumble over: `lmm-r1 check_data`."""
