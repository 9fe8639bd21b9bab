"""AdamW, Muon and SGD on fp32 master weights; gradient norm, clipping and rate schedules."""
