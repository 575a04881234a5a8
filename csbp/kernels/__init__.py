"""Kernels of block attention, each a backend that `csbp.backends` names and the plain one is the test of."""
