"""Horovod's names (docs/horovod.md): a script imports `elastic.horovod.torch` where it imported `horovod.torch`.

torch.py  for PyTorch
"""
