"""AdamW over fp32 master weights, gradient norm and clipping, learning-rate schedule."""
