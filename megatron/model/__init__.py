"""The GPT configuration, and the parts of the model that a pipeline stage owns."""
