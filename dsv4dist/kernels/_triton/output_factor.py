"""The end of a softmax, for all kernels in Gluon: by what the weighted values are divided (attention spec 1.2, 4.3)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def output_factor(top, total, sink_ptr, lane, heads_left, HAS_SINK: gl.constexpr):
    """What to multiply the weighted values [HEADS] with: one over the sum, the sink included; 0 without keys."""
    fade = gl.full(top.shape, 1.0, gl.float32, top.type.layout)
    if HAS_SINK:
        sink = gl.load(sink_ptr + lane, mask=lane < heads_left, other=float("-inf"))
        sink = sink * 1.4426950408889634
        highest = gl.maximum(top, sink)
        base = gl.where(highest == float("-inf"), 0.0, highest)
        fade = gl.exp2(top - base)
        total = total * fade + gl.exp2(sink - base)
    return gl.where(total > 0.0, fade / gl.maximum(total, 1e-30), 0.0)
