"""VLMEvalKit and lmms-eval: what they predicted is read and judged, and our responses are written in their forms."""
