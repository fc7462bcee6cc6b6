"""torchport carries PyTorch models written for GPUs onto TPU, without editing the models' own repositories."""

__version__ = "0.1.0"
