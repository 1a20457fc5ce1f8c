"""The inference server: one model of a bundle or a registry behind HTTP. Does not import torch."""
