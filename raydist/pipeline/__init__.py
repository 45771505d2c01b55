"""Models that do not fit one worker: cut into stages, each held by a worker, micro-batches flowing through.

from raydist.pipeline import Layer, cut, layers_of
"""

from raydist.pipeline.layers import Layer, layers_of
from raydist.pipeline.partition import cut, cut_as_asked

__all__ = ["Layer", "cut", "cut_as_asked", "layers_of"]
