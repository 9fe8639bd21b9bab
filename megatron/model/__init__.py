"""The GPT configuration and what one pipeline stage owns."""
