"""Configuration: layers merged and validated at parse time, cut into the slice that each stage is handed."""
