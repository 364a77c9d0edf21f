"""VLMEvalKit and lmms-eval: reads and judges their predictions, and exports responses in their formats."""
