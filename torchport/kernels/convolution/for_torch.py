"""A video decoder's parts for patches: functions of torch tensors, traced into JAX, and computed in PyTorch otherwise.

In PyTorch the whole video is computed at once and without padding, as upstream computes it.

Traced, a decoder runs on chunks of time, one after the other, in a loop of the program. The same function runs on every
chunk, so that it is compiled once. A causal convolution in it needs some values of the chunk before (its carry), and
leaves such values to the chunk after. `_Tape` has the carries of all convolutions, in the order of their calls.

Shapes: B batch, C channels, T frames, H rows, W columns.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.nn import functional

from torchport import engine
from torchport.kernels.convolution import canvas
from torchport.kernels.convolution.canvas import Canvas

Layer = Callable[[torch.Tensor], torch.Tensor]
"""A function from a video to a video."""
CHUNK = 8
"""Frames of a chunk of time, at most."""


@dataclasses.dataclass(eq=False)
class _Tape:
    """The carries of convolutions from a chunk of time to the next chunk, in the order of the calls."""

    values: list[Any] | None  #: The carries from the chunk before; None while their shapes are being found out.
    number: Any  #: The chunk's number, from 0.
    count: int  #: How many chunks the video has.
    left: list[Any] = dataclasses.field(default_factory=list)  #: The carries that this chunk's calls have left so far.

    def take(self) -> Any:
        """Returns the carry that the same call has left in the chunk before; None if carries are not known."""
        return None if self.values is None else self.values[len(self.left)]


_TAPE: contextvars.ContextVar[_Tape | None] = contextvars.ContextVar("tape", default=None)


@contextlib.contextmanager
def spread(
    latents_BCTHW: torch.Tensor, multiple: int = 16, *, paired: bool = False
) -> Iterator[tuple[torch.Tensor, Canvas]]:
    """Yields latents with padding, sharded over the devices, and the canvas that is the current one inside.

    Frames of padding before the first frame repeat it: a `still` convolution computes the same for each of them, and
    other convolutions take them as 0. Rows and columns of padding, and frames after the last, hold anything.

    Args:
        multiple: The number to a multiple of which T is padded for the kernel, itself a multiple of 8.
        paired: Whether upstream decodes two latent frames at a time, and first three if their number is odd. Then each
            pair begins at an even frame, `batch_moments` knows which frames are decoded together, and T is padded to
            whole chunks.
    """
    frames, height, width = latents_BCTHW.shape[2:]
    if not engine.is_traced(latents_BCTHW):
        lead = frames % 2 if paired else 0
        single = not paired or lead == 1
        form = Canvas(frames + lead, height, width, lead, valid_height=height, valid_width=width, single=single)
        with canvas.using(form):
            yield torch.cat([latents_BCTHW[:, :, :lead], latents_BCTHW], 2), form
        return
    from torchport.kernels.convolution import forms

    most = forms.PAIRED if paired else multiple
    least = min(most, frames + frames % 2) if paired else 1  # XLA takes any number; pairs need an even one
    multiple = most if forms.uses_kernel() else least
    form = canvas.of_latents(frames, height, width, multiple=multiple, paired=paired)
    first = latents_BCTHW[:, :, :1].expand(-1, -1, form.lead, -1, -1)
    last = latents_BCTHW[:, :, -1:].expand(-1, -1, form.tail, -1, -1)
    video = torch.cat([first, latents_BCTHW, last], 2)
    padded = functional.pad(video, (0, form.width - width, 0, form.height - height))
    if not jax.sharding.get_abstract_mesh().empty:
        padded = engine.call_jax(jax.lax.with_sharding_constraint, padded, form.spec)
    with canvas.using(form):
        yield padded, form


def crop(video_BCTHW: torch.Tensor, form: Canvas) -> torch.Tensor:
    """Returns a video on a canvas without its padding of frames, rows and columns."""
    frames, height, width = video_BCTHW.shape[2:]
    video = video_BCTHW[:, :, max(0, form.lead_of(frames)) : frames - form.tail * (frames // form.frames)]
    return video[..., : form.valid_rows(height), : form.valid_columns(width)]


def is_first(x_BCTHW: torch.Tensor) -> torch.Tensor:
    """Returns which frames of a video or chunk are made of the first latent frame or its padding: bool [T, 1, 1]."""
    numbers = torch.arange(x_BCTHW.shape[2]).to(x_BCTHW.device)
    first: torch.Tensor = numbers < _lead(x_BCTHW) + 1
    return first[:, None, None]


def _frames_in_all(x_BCTHW: torch.Tensor) -> int:
    """Returns the number of frames of the whole video, of which x may be a chunk."""
    tape = _tape(x_BCTHW)
    return x_BCTHW.shape[2] * (1 if tape is None else tape.count)


def _lead(x_BCTHW: torch.Tensor) -> Any:
    """Returns the index of the first valid frame, counted from the start of x: negative in a later chunk."""
    lead, tape = canvas.current().lead_of(_frames_in_all(x_BCTHW)), _tape(x_BCTHW)
    return lead if tape is None else lead - tape.number * x_BCTHW.shape[2]


def _tape(x: torch.Tensor) -> _Tape | None:
    """Returns the tape of the chunk that is being traced; None outside of `by_chunks` and outside of a trace."""
    return _TAPE.get() if engine.is_traced(x) else None


def conv3d(
    x_BCTHW: torch.Tensor,
    weight_DCTHW: torch.Tensor,
    bias_D: torch.Tensor | None,
    *,
    edges: bool,
    gains_C: torch.Tensor | None = None,
    residual_BDTHW: torch.Tensor | None = None,
    scaling: tuple[torch.Tensor, torch.Tensor] | None = None,
    still: bool | None = None,
    zoom: int = 1,
) -> torch.Tensor:
    """Returns a convolution that is causal in time and as large as its input, [B, D, T, H, W].

    Args:
        x_BCTHW: A video, or inside `by_chunks` a chunk of it.
        weight_DCTHW: [D, C, 3 or 1, 3, 3].
        edges: Whether the video is padded with its nearest row and column; otherwise with 0.
        gains_C: Gains of an RMSNorm over channels: x becomes SiLU(RMSNorm(x)) first.
        residual_BDTHW: Added to the output. With `zoom` it may have fewer rows or columns, which are repeated, too.
        scaling: Scale and shift, both [B, C, T, H, W]: x becomes SiLU(x * scale + shift) first. They may have fewer
            rows and columns than x, each of which is then for several of x's.
        still: Whether the padding before the first frame repeats this frame; otherwise it is 0. None: as `edges`.
        zoom: How often rows and columns of x are repeated first: nearest-neighbour upsampling.
    """
    still = edges if still is None else still
    taps, form = weight_DCTHW.shape[2], canvas.current()
    # Frames of padding repeat the first frame. A still convolution takes them as they are, and any other as 0.
    takes_zeros = not still and taps > 1
    has_lead = takes_zeros and form is not canvas.NONE and form.lead_of(_frames_in_all(x_BCTHW)) != 0
    lead = _lead(x_BCTHW) if has_lead else None
    if not engine.is_traced(x_BCTHW):
        x = x_BCTHW
        if scaling is not None:
            scale, shift = (_repeated(small, x) for small in scaling)
            x = functional.silu(x * scale + shift).to(x.dtype)
        x = x.repeat_interleave(zoom, 3).repeat_interleave(zoom, 4)
        if gains_C is not None:
            x = functional.normalize(x, dim=1) * math.sqrt(x.shape[1]) * gains_C.view(-1, 1, 1, 1)
            x = functional.silu(x)
        x = functional.pad(x[:, :, lead:], (0, 0, 0, 0, lead, 0)) if lead else x
        x = functional.pad(x, (1, 1, 1, 1, 0, 0), mode="replicate" if edges else "constant")
        x = functional.pad(x, (0, 0, 0, 0, taps - 1, 0), mode="replicate" if still else "constant")
        x = functional.conv3d(x, weight_DCTHW, bias_D)
        return x if residual_BDTHW is None else x + _repeated(residual_BDTHW, x)
    from torchport.kernels.convolution import by_xla, forms

    tape = _tape(x_BCTHW) if taps > 1 else None
    request = by_xla.ConvolutionRequest(edges, chunked=tape is not None, still=still, zoom=zoom)
    operands = {"gains": gains_C, "residual": residual_BDTHW, "lead": lead}
    if scaling is not None:
        operands |= {"scale": scaling[0], "shift": scaling[1]}
    if tape is not None and (carry := tape.take()) is not None:
        operands |= {"carry": carry, "first": tape.number == 0}
    run = functools.partial(forms.convolved, request)
    out, left = engine.call_kernel(run, x_BCTHW, weight_DCTHW, bias_D, **operands)
    if tape is not None:
        tape.left.append(left)
    result: torch.Tensor = out
    return result


def _repeated(small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """Returns a small video with its rows and columns repeated, to as many as the large video has."""
    for dim in (3, 4):
        small = small.repeat_interleave(large.shape[dim] // small.shape[dim], dim)
    return small


def unfolded(
    hidden_BCTHW: torch.Tensor, shortcut_BCTHW: torch.Tensor, repeats: int, *, makes_frames: bool
) -> torch.Tensor:
    """Returns the sum of a video and a shortcut, whose channels become 2 rows, 2 columns, and 1 or 2 frames each.

    Channels [B, r1 r2 r3 c, T, H, W] become [B, c, r1 T, r2 H, r3 W], after the shortcut's channels are repeated. If
    r1 is 2, upstream still makes a single frame of the first latent frame, from channels in another order. Here it
    becomes two equal frames, so that all frames are alike: `crop` leaves out the surplus.

    Args:
        repeats: How often each channel of the shortcut is repeated.
        makes_frames: Whether r1 is 2; else it is 1.
    """
    times = 2 if makes_frames else 1
    out = _by_position(hidden_BCTHW, times) + _by_position(shortcut_BCTHW.repeat_interleave(repeats, dim=1), times)
    if makes_frames:
        first = _by_position(hidden_BCTHW, times=1)[:, :, :, :, : hidden_BCTHW.shape[1] // 8]
        first = first + _by_position(shortcut_BCTHW, times=1).repeat_interleave(repeats // 2, dim=4)
        out = torch.where(is_first(shortcut_BCTHW), first, out)
    out = out.permute(0, 4, 5, 1, 6, 2, 7, 3)
    batch, channels, frames, _, height, _, width, _ = out.shape
    return out.reshape(batch, channels, frames * times, height * 2, width * 2)


def _by_position(x: torch.Tensor, times: int) -> torch.Tensor:
    """Returns channels by the frame, row and column that they become: [B, times, 2, 2, c, T, H, W]."""
    return x.reshape(x.shape[0], times, 2, 2, -1, *x.shape[2:])


def with_frames_before(x_BCTHW: torch.Tensor, count: int) -> torch.Tensor:
    """Returns a video or chunk with the `count` frames before it in front, which are 0 before the first frame."""
    tape = _tape(x_BCTHW)
    kept = None if tape is None else tape.take()
    before = torch.zeros_like(x_BCTHW[:, :, :1]).repeat(1, 1, count, 1, 1) if kept is None else kept
    x = torch.cat([before, x_BCTHW], 2)
    if tape is not None:
        tape.left.append(x[:, :, x.shape[2] - count :])
    return x


def batch_moments(x_BCTHW: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and variance of groups of channels, over all frames that upstream decodes in the same batch.

    Padding does not count. The video must be from `spread(..., paired=True)`, or a chunk of such a video.

    Returns:
        Mean and variance for each frame, float32 [B, groups, T].
    """
    if engine.is_traced(x_BCTHW):
        from torchport.kernels.convolution import moments

        mean, variance = engine.call_kernel(functools.partial(moments.of_frames, groups), x_BCTHW)
    else:
        grouped = x_BCTHW.float().reshape(x_BCTHW.shape[0], groups, -1, *x_BCTHW.shape[2:])
        variance, mean = torch.var_mean(grouped, (2, 4, 5), correction=0)
    batch_of_frame, counts = _batches(x_BCTHW)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)

    def over_batch(moments_BGT: torch.Tensor) -> torch.Tensor:
        """Returns, for each frame, the mean of a moment over its batch of frames."""
        # A sum, as a TPU rounds the operands of a product of matrices.
        return (moments_BGT[:, :, None] * shares).sum(-1)[..., batch_of_frame]

    joined = over_batch(mean)
    return joined, over_batch(variance + (mean - joined) ** 2)  # within the frames, and between them


def _batches(x_BCTHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the batches that upstream decodes: each frame's [T], and 1.0 for a batch's valid frames [batches, T]."""
    frames = x_BCTHW.shape[2]
    form = canvas.current()
    tape = _tape(x_BCTHW)
    total = _frames_in_all(x_BCTHW)
    device, times = x_BCTHW.device, total // form.frames
    first = torch.tensor(True).to(device) if tape is None else tape.number == 0
    numbers = torch.arange(frames).to(device)
    pair = numbers // (2 * times)
    # The first of an odd number of latent frames is decoded with the pair after it.
    joined = pair.clamp(min=1) if form.lead and form.frames - form.tail > 2 else pair
    batch = torch.where(first, joined, pair)
    is_padding = first & (numbers < form.lead_of(total))
    batches = torch.arange(frames // (2 * times)).to(device)[:, None]
    return batch, ((batch == batches) & ~is_padding).float()


def by_chunks(layer: Layer, x_BCTHW: torch.Tensor) -> torch.Tensor:
    """Applies a layer to a video a chunk at a time, to save memory; returns the whole result.

    The layer must look back in time by `conv3d` and `with_frames_before` alone.

    Args:
        layer: Called with `CHUNK` frames, or fewer if `CHUNK` does not divide T. Returns as many frames, or a multiple.
    """
    frames = x_BCTHW.shape[2]
    if not engine.is_traced(x_BCTHW) or frames <= CHUNK:
        return layer(x_BCTHW)
    size = math.gcd(CHUNK, frames)
    video: torch.Tensor = engine.call_jax(functools.partial(_scan_chunks, layer, size), x_BCTHW)
    return video


def _scan_chunks(layer: Callable[[Any], Any], size: int, x_BCTHW: jax.Array) -> jax.Array:
    """Applies a layer of torchax tensors to chunks of `size` frames in a single `lax.scan`; returns the whole video."""
    batch, channels, frames, height, width = x_BCTHW.shape
    count = frames // size

    def in_torch(values: list[Any] | None, number: Any, x: Any) -> tuple[list[Any], Any]:
        """Applies the layer to a chunk, given the carries from the chunk before; returns its carries and its result."""
        tape = _Tape(values, number, count)
        token = _TAPE.set(tape)
        try:
            out = layer(x)
        finally:
            _TAPE.reset(token)
        return tape.left, out

    def run(values: list[Any] | None, chunk: tuple[jax.Array, jax.Array]) -> tuple[list[Any], Any]:
        outputs: tuple[list[Any], Any] = engine.call_torch(in_torch, values, *chunk)
        return outputs

    chunks = jnp.moveaxis(x_BCTHW.reshape(batch, channels, count, size, height, width), 2, 0)
    # The first chunk's carries need shapes; a trace without carries says which shapes the calls leave.
    left, _ = jax.eval_shape(functools.partial(run, None), (jnp.int32(0), chunks[0]))
    start = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in left]
    _, outs = lax.scan(run, start, (jnp.arange(count, dtype=jnp.int32), chunks))
    joined = jnp.moveaxis(outs, 0, 2)
    return joined.reshape(*joined.shape[:2], -1, *joined.shape[4:])


def through(layers: Sequence[Layer], last: Layer, x_BCTHW: torch.Tensor) -> torch.Tensor:
    """Applies layers and then `last` to a video; from the last layer that adds frames on, in chunks of time."""
    adding = [n for n, layer in enumerate(layers) if getattr(layer, "add_temporal_upsample", False)]
    count = adding[-1] if adding else 0

    def run(layers: Sequence[Layer], x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda value, layer: layer(value), layers, x)

    return by_chunks(functools.partial(run, [*layers[count:], last]), run(layers[:count], x_BCTHW))


def frame_attention(
    q_BCTHW: torch.Tensor, k_BCTHW: torch.Tensor, v_BCTHW: torch.Tensor, *, causal: bool = True
) -> torch.Tensor:
    """Returns attention of each latent position to its own frame and, if causal, to all earlier ones; one head.

    Every device gets all keys and computes its own queries, a frame at a time. So only the scores of a frame are in
    memory, of (T H W) x (T H W) in all.
    """
    if engine.is_traced(q_BCTHW):
        run = functools.partial(_frame_attention, causal)
        out: torch.Tensor = engine.call_kernel(run, q_BCTHW, k_BCTHW, v_BCTHW)
        return out
    frames = q_BCTHW.shape[2]
    q, k, v = (x.flatten(3).permute(0, 2, 3, 1) for x in (q_BCTHW, k_BCTHW, v_BCTHW))  # [B, T, H * W, C]
    seen = [slice(0 if causal else n, n + 1) for n in range(frames)]
    outs = [
        functional.scaled_dot_product_attention(q[:, n], k[:, some].flatten(1, 2), v[:, some].flatten(1, 2))
        for n, some in enumerate(seen)
    ]
    return torch.stack(outs, 1).permute(0, 3, 1, 2).reshape(q_BCTHW.shape)


def _frame_attention(causal: bool, q_BCTHW: jax.Array, k_BCTHW: jax.Array, v_BCTHW: jax.Array) -> jax.Array:
    """Computes `frame_attention` in JAX, [B, C, T, H, W], on the current canvas; padding takes no part."""
    form, lead = canvas.current(), canvas.current().lead

    def local(q_BCTHW: jax.Array, k_BCTHW: jax.Array, v_BCTHW: jax.Array) -> jax.Array:
        """Returns attention of a device's queries [B, C, T, h, w] to the keys of all devices."""
        for axes, dim in ((form.rows, 3), (form.columns, 4)):
            k_BCTHW, v_BCTHW = (
                lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x for x in (k_BCTHW, v_BCTHW)
            )
        batch, channels, frames, height, width = k_BCTHW.shape
        rows = form.valid_rows(height)
        columns = form.valid_columns(width)
        k_BCTS, v_BCTS = (x[..., :rows, :columns].reshape(batch, channels, frames, -1) for x in (k_BCTHW, v_BCTHW))
        q = jnp.moveaxis(q_BCTHW.reshape(*q_BCTHW.shape[:3], -1), 2, 0)
        k, v = (x.reshape(batch, channels, -1) for x in (k_BCTS, v_BCTS))
        frame_of_key = jnp.repeat(jnp.arange(frames), rows * columns)

        def attend(frame: tuple[jax.Array, jax.Array]) -> jax.Array:
            number, queries = frame
            # Frames of padding repeat the first frame: their queries see it, and their keys take no part.
            seen = (frame_of_key >= lead) & (frame_of_key <= jnp.maximum(number, lead))
            return _one_head(queries, k, v, seen)

        if causal:
            out = lax.map(attend, (jnp.arange(frames), q))
        else:
            out = lax.map(lambda item: _one_head(*item), (q, jnp.moveaxis(k_BCTS, 2, 0), jnp.moveaxis(v_BCTS, 2, 0)))
        return jnp.moveaxis(out, 0, 2).reshape(q_BCTHW.shape)

    whole: jax.Array = canvas.on_parts(local, (form.spec,) * 3, form.spec)(q_BCTHW, k_BCTHW, v_BCTHW)
    return whole


def _one_head(q_BCS: jax.Array, k_BCT: jax.Array, v_BCT: jax.Array, seen_T: jax.Array | None = None) -> jax.Array:
    """Returns softmax(q^T k / sqrt(C)) v of a single head, [B, C, S]; keys that are not `seen` take no part."""
    scores = jnp.einsum("bcs,bct->bst", q_BCS * q_BCS.shape[1] ** -0.5, k_BCT, preferred_element_type=jnp.float32)
    scores = scores if seen_T is None else jnp.where(seen_T, scores, -jnp.inf)
    return jnp.einsum("bst,bct->bcs", jax.nn.softmax(scores, axis=-1).astype(v_BCT.dtype), v_BCT)
