"""A video decoder's parts for patches: functions of torch tensors, traced into JAX, and computed in PyTorch otherwise.

In PyTorch the whole video is computed at once, and there is no padding: what upstream computes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from torchport import engine
from torchport.convolution import canvas
from torchport.convolution.canvas import Canvas


@contextlib.contextmanager
def spread(latents_BCTHW: torch.Tensor, paired: bool = False) -> Iterator[tuple[torch.Tensor, Canvas]]:
    """Gives latents as they lie on the devices, with padding, and the canvas on which all inside is computed.

    Frames of padding repeat the first one: a causal convolution computes the same for each of them. Rows and columns of
    padding hold anything, and so do frames after the last.

    Args:
        latents_BCTHW: The video's.
        paired: Whether upstream decodes two latent frames at a time, and three at first where their number is odd. Then
            each pair begins at an even frame, and `batch_moments` knows which frames are decoded together.
    """
    frames, height, width = latents_BCTHW.shape[2:]
    if not engine.is_traced(latents_BCTHW):
        lead = frames % 2 if paired else 0
        form = Canvas(frames + lead, height, width, lead, height, width, single=not paired or lead == 1)
        with canvas.using(form):
            yield torch.cat([latents_BCTHW[:, :, :lead], latents_BCTHW], 2), form
        return
    import jax

    from torchport.convolution import dispatch

    multiple = dispatch.pair_multiple(frames) if paired else dispatch.frame_multiple()
    form = canvas.of_latents(frames, height, width, multiple=multiple, paired=paired)
    first = latents_BCTHW[:, :, :1].expand(-1, -1, form.lead, -1, -1)
    last = latents_BCTHW[:, :, -1:].expand(-1, -1, form.tail, -1, -1)
    every = torch.cat([first, latents_BCTHW, last], 2)
    padded = functional.pad(every, (0, form.width - width, 0, form.height - height))
    if not jax.sharding.get_abstract_mesh().empty:
        padded = engine.call_jax(jax.lax.with_sharding_constraint, padded, form.spec)
    with canvas.using(form):
        yield padded, form


def crop(video_BCTHW: torch.Tensor, form: Canvas) -> torch.Tensor:
    """Returns what is made of latents without padding."""
    frames, height, width = video_BCTHW.shape[2:]
    video = video_BCTHW[:, :, max(0, form.lead_of(frames)) : frames - form.tail_of(frames)]
    return video[..., : form.valid_rows(height), : form.valid_columns(width)]


def is_first(x_BCTHW: torch.Tensor) -> torch.Tensor:
    """Returns which of a video's frames, or of a chunk's, are made of the first latent frame: bool [T, 1, 1].

    Padding before it is among them.
    """
    from torchport.convolution import chunks

    frames, tape = x_BCTHW.shape[2], chunks.current()
    every = frames if tape is None else frames * tape.count
    first = (torch.arange(frames) <= canvas.current().lead_of(every)).to(x_BCTHW.device)
    return (first if tape is None else first & tape.first)[:, None, None]


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
        x_BCTHW: A video, or the chunk of it that `by_chunks` is at.
        weight_DCTHW: [D, C, 3 or 1, 3, 3].
        bias_D: Or None.
        edges: Whether what is outside is the nearest row and column; otherwise it is 0.
        gains_C: Of an RMSNorm over channels that x goes through first, and then SiLU.
        residual_BDTHW: Added to the output.
        scaling: Scale and shift that x goes through first, and then SiLU, both [B, C, T, H, W]. Their H and W may be
            parts of x's: each row and column is for as many of x as there are then.
        still: Whether what is before the first frame is that frame; otherwise it is 0. None: as `edges` says.
        zoom: How many rows and columns each of x becomes first.
    """
    still = edges if still is None else still
    if not engine.is_traced(x_BCTHW):
        if scaling is not None:
            x_BCTHW = _scaled(x_BCTHW, *scaling)
        x_BCTHW = x_BCTHW.repeat_interleave(zoom, 3).repeat_interleave(zoom, 4)
        return _eager(x_BCTHW, weight_DCTHW, bias_D, edges, still, gains_C, residual_BDTHW)
    from torchport.convolution import chunks, dispatch

    tape = chunks.current()
    request = dispatch.Request(edges, chunked=tape is not None, still=still, zoom=zoom)
    scale, shift = scaling or (None, None)
    first, carry = (None, None) if tape is None else (tape.first, tape.take())
    run = functools.partial(dispatch.convolved, request)
    beside = (gains_C, residual_BDTHW, scale, shift, carry, None if carry is None else first)
    out, left = engine.call_jax(run, x_BCTHW, weight_DCTHW, bias_D, *beside)
    if tape is not None:
        tape.leave(left)
    result: torch.Tensor = out
    return result


def _eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: bool,
    still: bool,
    gains: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    if gains is not None:
        x = functional.normalize(x, dim=1) * math.sqrt(x.shape[1]) * gains.view(-1, 1, 1, 1)
        x = functional.silu(x)
    x = functional.pad(x, (1, 1, 1, 1, 0, 0), mode="replicate" if edges else "constant")
    x = functional.pad(x, (0, 0, 0, 0, weight.shape[2] - 1, 0), mode="replicate" if still else "constant")
    x = functional.conv3d(x, weight, bias)
    return x if residual is None else x + residual


def _scaled(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    times = x.shape[4] // scale.shape[4]
    scale, shift = (each.repeat_interleave(times, 3).repeat_interleave(times, 4) for each in (scale, shift))
    return functional.silu(x * scale + shift).to(x.dtype)


def batch_moments(x_BCTHW: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and variance of groups of channels, over all frames that upstream decodes together with each frame.

    Padding does not count. It is for videos of `spread(..., paired=True)`.

    Args:
        x_BCTHW: A video, or the chunk of it that `by_chunks` is at.
        groups: How many groups there are.

    Returns:
        Two of float32, [B, groups, T].
    """
    if engine.is_traced(x_BCTHW):
        from torchport.convolution import moments

        mean, variance = engine.call_jax(functools.partial(moments.of_frames, groups), x_BCTHW)
    else:
        grouped = x_BCTHW.float().reshape(x_BCTHW.shape[0], groups, -1, *x_BCTHW.shape[2:])
        variance, mean = torch.var_mean(grouped, (2, 4, 5), correction=0)
    batch_of_frame, counts = _batches(x_BCTHW)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)

    def over_batch(each_BGT: torch.Tensor) -> torch.Tensor:  # no product of matrices, which a TPU rounds
        return (each_BGT[:, :, None] * shares).sum(-1)[..., batch_of_frame]

    together = over_batch(mean)
    return together, over_batch(variance + (mean - together) ** 2)


def _batches(x_BCTHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the batch of each frame, [T], and which frames count in each of the batches, [batches, T]."""
    from torchport.convolution import chunks

    frames, form, tape = x_BCTHW.shape[2], canvas.current(), chunks.current()
    every = frames if tape is None else frames * tape.count
    device, times = x_BCTHW.device, every // form.frames
    first = torch.tensor(True).to(device) if tape is None else tape.first
    numbers = torch.arange(frames).to(device)
    pair = numbers // (2 * times)
    # The first of an odd number of latent frames is decoded with the pair after it.
    joined = pair.clamp(min=1) if form.lead and form.frames - form.tail > 2 else pair
    batch = torch.where(first, joined, pair)
    is_padding = first & (numbers < form.lead_of(every))
    every_batch = torch.arange(frames // (2 * times)).to(device)[:, None]
    return batch, ((batch == every_batch) & ~is_padding).float()


def by_chunks(step: Callable[[torch.Tensor], torch.Tensor], x_BCTHW: torch.Tensor, most: int = 8) -> torch.Tensor:
    """Returns what a function makes of a video, a few frames at a time; only they are in memory at once.

    All that looks back in time in it must be `conv3d`.

    Args:
        step: Called with frames, returns frames: as many for each of them, or a multiple.
        x_BCTHW: The video. All frames of the first latent frame are in the first chunk.
        most: Frames of a chunk; they are fewer where this does not divide T.
    """
    if not engine.is_traced(x_BCTHW):
        return step(x_BCTHW)
    from torchport.convolution import chunks

    size = math.gcd(most, x_BCTHW.shape[2])
    if size == x_BCTHW.shape[2]:
        return step(x_BCTHW)
    video: torch.Tensor = engine.call_jax(functools.partial(chunks.scanned, step, size), x_BCTHW)
    return video


def frame_attention(q_BCTHW: torch.Tensor, k_BCTHW: torch.Tensor, v_BCTHW: torch.Tensor) -> torch.Tensor:
    """Returns attention of each latent position to all of its own frame and of earlier ones, with one head.

    Scores are computed for a frame of queries at a time.
    """
    if engine.is_traced(q_BCTHW):
        from torchport.convolution import frame_attention as form

        out: torch.Tensor = engine.call_jax(form.attention, q_BCTHW, k_BCTHW, v_BCTHW)
        return out
    frames = q_BCTHW.shape[2]
    q, k, v = (x.flatten(3).permute(0, 2, 3, 1) for x in (q_BCTHW, k_BCTHW, v_BCTHW))  # [B, T, H * W, C]
    outs = [
        functional.scaled_dot_product_attention(q[:, n], k[:, : n + 1].flatten(1, 2), v[:, : n + 1].flatten(1, 2))
        for n in range(frames)
    ]
    return torch.stack(outs, 1).permute(0, 3, 1, 2).reshape(q_BCTHW.shape)
