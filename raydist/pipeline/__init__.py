"""Models that do not fit one worker: cut into stages, each held by a worker, micro-batches flowing through.

from raydist.pipeline import Layer, cut, layers_of          a model's layers, and the exact cut by costs
from raydist.pipeline import orders, simulate, bubble       what each stage does when, and how idle it is
"""

from raydist.pipeline.layers import Layer, layers_of
from raydist.pipeline.orders import bubble, limit, orders, simulate
from raydist.pipeline.partition import cut, cut_as_asked

__all__ = ["Layer", "bubble", "cut", "cut_as_asked", "layers_of", "limit", "orders", "simulate"]
