"""Pretrained models of others, in local folders of Hugging Face: read safely, never changed."""
