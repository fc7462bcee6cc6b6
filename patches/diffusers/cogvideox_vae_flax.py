"""The decoder of CogVideoX's VAE in flax.nnx: channels last, with the weights of diffusers' modules.

Upstream decodes two latent frames at a time, the first time one more where their number is odd. The statistics of its
norms are of such a batch, so batches are the same here. What a convolution needs of the batch before it, its last two
input frames, are values: every batch but the first is a step of one loop, which is compiled once.

Shapes: B batch, T frames, H rows, W columns, C channels. A cache has a module's values for the next batch, as a tree.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from torchport import engine
from torchport.errors import AbsentPackageError, BadValueError, CheckpointForeignError, UnfilledWeightError, nearest
from torchport.kernels.convolution import forms

try:
    from flax import nnx
except ModuleNotFoundError as error:
    remedy = "Install it: pip install 'torchport[flax]', or choose another implementation of 'vae'"
    raise AbsentPackageError("vae: {implementation: flax}", "flax is not installed", remedy) from error

PLACE = "CogVideoX's VAE in Flax"
BATCH = 2
"""Latent frames that are decoded at a time."""
BEFORE = 2
"""Frames of its input that a convolution needs before those of its output."""
EPSILON = 1e-6
"""Of every norm of the decoder, whatever the configuration's `norm_eps`."""


def decode(original, self, z, return_dict=True):
    """Returns what `AutoencoderKLCogVideoX.decode` returns, traced through the modules below.

    In PyTorch, as in a rehearsal without values, it is upstream's own.

    Args:
        original: Upstream's method.
        self: The VAE.
        z: Latents [B, C, T, H, W].
        return_dict: Whether the video [B, 3, F, 8 H, 8 W] is put into a `DecoderOutput`, or into a tuple.

    Raises:
        BadValueError: Tiles, which are another function, or a configuration that the modules do not have.
        CheckpointForeignError, UnfilledWeightError: Weights that are not those of the modules.
    """
    if not engine.is_traced(z):
        return original(self, z, return_dict)
    from diffusers.models.autoencoders.vae import DecoderOutput

    if self.use_tiling:
        raise BadValueError(PLACE, "It decodes the whole video, and tiling is enabled", "Remove 'vae_tiling'")
    tensors = {f"decoder.{name}": weight for name, weight in self.decoder.named_parameters()}
    if self.post_quant_conv is not None:
        tensors |= {f"post_quant_conv.{name}": weight for name, weight in self.post_quant_conv.named_parameters()}
    sizes = dict(self.config)
    video = engine.call_kernel(lambda latents, weights: decoded(sizes, weights, latents), z, tensors)
    return DecoderOutput(sample=video) if return_dict else (video,)


def decoded(config, tensors, z_BCTHW):
    """Returns the video [B, 3, F, 8 H, 8 W] of latents.

    Args:
        config: The VAE's configuration.
        tensors: Its weights by their names in PyTorch.
        z_BCTHW: The latents.
    """
    z = jnp.moveaxis(z_BCTHW, 1, -1)
    spec = parting(*z.shape[2:4])
    model = filled(config, tensors, spec)
    z = z if spec is None else jax.lax.with_sharding_constraint(z, spec)
    count = max(z.shape[1] // BATCH, 1)
    first = z.shape[1] - BATCH * (count - 1)
    video, cache = model(z[:, :first], None)
    if count > 1:
        rest = z[:, first:].reshape(z.shape[0], count - 1, BATCH, *z.shape[2:])

        def step(cache, z):
            frames, cache = model(z, cache)
            return cache, frames

        _, frames = jax.lax.scan(step, cache, jnp.moveaxis(rest, 1, 0))
        frames = jnp.moveaxis(frames, 0, 1).reshape(z.shape[0], -1, *video.shape[2:])
        video = jnp.concatenate([video, frames], 1)
    return jnp.moveaxis(video, -1, 1)


def parting(height, width):
    """Returns where an array [B, T, H, W, C] lies on the mesh that is set: None without one.

    Its axes part columns, or else rows, as many of them as divide latents; the first of such partings has the most
    parts, and of those with as many the fewest of rows.

    Args:
        height: Rows of the latents.
        width: Columns of the latents.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    choices = []
    for sides in itertools.product(("columns", "rows", None), repeat=len(sizes)):
        rows, columns = (
            tuple(n for n, s in zip(sizes, sides, strict=True) if s == side) for side in ("rows", "columns")
        )
        ways = [math.prod(sizes[name] for name in names) for names in (rows, columns)]
        if height % ways[0] == 0 and width % ways[1] == 0:
            choices.append((-math.prod(ways), ways[0], rows, columns))
    *_, rows, columns = min(choices)
    return PartitionSpec(None, None, rows or None, columns or None, None)


def window(spec):
    """Returns the padding of a convolution over 3 rows and 3 columns: none where `on_parts` brings the neighbours'."""
    rows, columns = (None, None) if spec is None else spec[2:4]
    return ((0, 0) if rows else (1, 1), (0, 0) if columns else (1, 1))


def on_parts(conv, x_BTHWC, spec):
    """Returns a convolution over rows and columns of each device's part, beside which it has its neighbours' edges.

    With sharding constraints on rows and columns alone, a decoder of these modules gave other values on CPU devices
    (28 % of the largest; JAX 0.10.2). The cause is not known, so each device gets its neighbours' edges by name.

    Args:
        conv: The convolution, with the padding of `window`.
        x_BTHWC: The input.
        spec: Where input and output lie.
    """
    if spec is None:
        return conv(x_BTHWC)
    graph, state = nnx.split(conv)

    def local(state, x):
        for dim, axes in enumerate(spec):
            if axes:
                before, after = forms.slices_beside(x, dim, axes, edges=False)
                x = jnp.concatenate([before, x, after], dim)
        return nnx.merge(graph, state)(x)

    return jax.shard_map(local, in_specs=(PartitionSpec(), spec), out_specs=spec, check_vma=False)(state, x_BTHWC)


class CausalConv(nnx.Module):
    """A convolution over 3 frames, 3 rows and 3 columns; before the first frame it sees copies of it."""

    def __init__(self, inputs, outputs, spec, rngs):
        self.conv = nnx.Conv(inputs, outputs, (3, 3, 3), padding=((0, 0), *window(spec)), rngs=rngs)
        self.spec = spec

    def __call__(self, x, cache):
        """Returns the output, as large as x, and the last two frames of the input."""
        before = jnp.repeat(x[:, :1], BEFORE, 1) if cache is None else cache
        x = jnp.concatenate([before, x], 1)
        return on_parts(self.conv, x, self.spec), x[:, -BEFORE:]


class GroupNorm(nnx.Module):
    """A norm over positions and the channels of a group, with statistics in float32."""

    def __init__(self, channels, groups, rngs):
        self.scale = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.groups = groups

    def __call__(self, x):
        """Returns x in float32, normalised; nothing of its size is kept in float32 where this is fused."""
        x = x.astype(jnp.float32)
        sums = jnp.stack([x.mean((1, 2, 3)), jnp.square(x).mean((1, 2, 3))])  # [2, B, C]
        means, squares = sums.reshape(*sums.shape[:2], self.groups, -1).mean(-1)
        variances = jnp.maximum(squares - jnp.square(means), 0)
        size = x.shape[-1] // self.groups
        mean, gain = (jnp.repeat(v, size, -1)[:, None, None, None] for v in (means, jax.lax.rsqrt(variances + EPSILON)))
        return (x - mean) * gain * self.scale[...] + self.bias[...]


class SpatialNorm(nnx.Module):
    """A GroupNorm whose output is multiplied by one projection of the latents, and to which another one is added."""

    def __init__(self, channels, sizes, rngs):
        self.norm_layer = GroupNorm(channels, sizes["norm_num_groups"], rngs)
        self.conv_y = Projection(sizes["latent_channels"], channels, rngs)
        self.conv_b = Projection(sizes["latent_channels"], channels, rngs)

    def __call__(self, x, z):
        """Returns the output after SiLU; projections of a latent are the same for all that becomes of it."""
        gain, shift = (stretched(conv(z), x.shape) for conv in (self.conv_y, self.conv_b))
        return nnx.silu(self.norm_layer(x) * gain + shift).astype(x.dtype)


class Projection(nnx.Module):
    """A linear map of channels, which upstream has as a causal convolution over one position."""

    def __init__(self, inputs, outputs, rngs):
        self.conv = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, x):
        """Returns the map of every position's channels."""
        return self.conv(x)


def stretched(z, shape):
    """Returns latents with each position repeated, up to the frames, rows and columns of a shape [B, T, H, W, C].

    Of an odd number of frames, the first one is made of the first latent frame, and the others of the others.
    """
    frames = shape[1]
    if frames > 1 and frames % 2:
        rest = jnp.repeat(z[:, 1:], (frames - 1) // (z.shape[1] - 1), 1)
        z = jnp.concatenate([z[:, :1], rest], 1)
    else:
        z = jnp.repeat(z, frames // z.shape[1], 1)
    return jnp.repeat(jnp.repeat(z, shape[2] // z.shape[2], 2), shape[3] // z.shape[3], 3)


class ResnetBlock(nnx.Module):
    """Twice norm, SiLU and convolution, added to the input, which is projected where its channels are others."""

    def __init__(self, inputs, outputs, sizes, spec, rngs):
        self.norm1 = SpatialNorm(inputs, sizes, rngs)
        self.conv1 = CausalConv(inputs, outputs, spec, rngs)
        self.norm2 = SpatialNorm(outputs, sizes, rngs)
        self.conv2 = CausalConv(outputs, outputs, spec, rngs)
        if inputs != outputs:
            self.conv_shortcut = nnx.Linear(inputs, outputs, rngs=rngs)
        self.projects = inputs != outputs

    def __call__(self, x, z, cache):
        """Returns the output and the caches of the two convolutions."""
        hidden, first = self.conv1(self.norm1(x, z), cache and cache[0])
        hidden, second = self.conv2(self.norm2(hidden, z), cache and cache[1])
        return (self.conv_shortcut(x) if self.projects else x) + hidden, (first, second)


class Upsample(nnx.Module):
    """Each position becomes four, and each frame two where time is upsampled, but not the first of an odd number."""

    def __init__(self, channels, time, spec, rngs):
        self.conv = nnx.Conv(channels, channels, (3, 3), padding=window(spec), rngs=rngs)
        self.time = time
        self.spec = spec

    def __call__(self, x):
        """Returns the larger video. The convolution is of single frames, so they are repeated after it."""
        batch, frames, height, width = x.shape[:4]
        x = on_parts(self.conv, stretched(x, (batch, frames, 2 * height, 2 * width)), self.spec)
        longer = frames if frames == 1 or not self.time else 2 * frames - frames % 2
        return stretched(x, (batch, longer, *x.shape[2:4]))


class Block(nnx.Module):
    """Residual blocks, and upsampling after them where there is one."""

    def __init__(self, channels, sizes, spec, rngs, *, upsamples=False, time=False):
        pairs = itertools.pairwise(channels)
        self.resnets = nnx.List([ResnetBlock(inputs, outputs, sizes, spec, rngs) for inputs, outputs in pairs])
        self.upsamplers = nnx.List([Upsample(channels[-1], time, spec, rngs)] if upsamples else [])

    def __call__(self, x, z, cache):
        """Returns the output and the caches of the residual blocks."""
        left = []
        for number, resnet in enumerate(self.resnets):
            x, kept = resnet(x, z, cache and cache[number])
            left.append(kept)
        for upsample in self.upsamplers:
            x = upsample(x)
        return x, tuple(left)


class Decoder(nnx.Module):
    """The decoder of one batch; its parts have the names that upstream gives them."""

    def __init__(self, sizes, spec, rngs):
        channels = list(reversed(sizes["block_out_channels"]))
        makes_time = int(math.log2(sizes["temporal_compression_ratio"]))
        self.conv_in = CausalConv(sizes["latent_channels"], channels[0], spec, rngs)
        self.mid_block = Block([channels[0]] * 3, sizes, spec, rngs)
        blocks = []
        for number, (inputs, outputs) in enumerate(itertools.pairwise([channels[0], *channels])):
            widths = [inputs] + [outputs] * (sizes["layers_per_block"] + 1)
            last, time = number == len(channels) - 1, number < makes_time
            blocks.append(Block(widths, sizes, spec, rngs, upsamples=not last, time=time))
        self.up_blocks = nnx.List(blocks)
        self.norm_out = SpatialNorm(channels[-1], sizes, rngs)
        self.conv_out = CausalConv(channels[-1], sizes["out_channels"], spec, rngs)

    def __call__(self, z, cache):
        """Returns the frames of some latent frames and the caches of all convolutions."""
        x, kept = self.conv_in(z, cache and cache[0])
        left = [kept]
        for block in (self.mid_block, *self.up_blocks):
            x, kept = block(x, z, cache and cache[len(left)])
            left.append(kept)
        x, kept = self.conv_out(self.norm_out(x, z), cache and cache[-1])
        return x, (*left, kept)


class Model(nnx.Module):
    """What upstream applies to each batch of latent frames."""

    def __init__(self, sizes, spec, rngs):
        self.decoder = Decoder(sizes, spec, rngs)
        channels = sizes["out_channels"]  # as upstream has it
        self.projects = sizes["use_post_quant_conv"]
        if self.projects:
            self.post_quant_conv = nnx.Linear(channels, channels, rngs=rngs)

    def __call__(self, z, cache):
        """Returns frames [B, F, 8 H, 8 W, 3] and the cache for the next batch."""
        return self.decoder(self.post_quant_conv(z) if self.projects else z, cache)


def filled(config, tensors, spec):
    """Returns the decoder with the weights of PyTorch's modules.

    Args:
        config: The VAE's configuration.
        tensors: Weights by their names in PyTorch.
        spec: Where activations lie.

    Raises:
        BadValueError: An activation function that the modules do not have.
        UnfilledWeightError: A weight of the decoder that is not among the tensors.
        CheckpointForeignError: A tensor that the decoder does not have, or of another shape.
    """
    if config["act_fn"] not in ("silu", "swish"):
        raise BadValueError(PLACE, f"'act_fn' is '{config['act_fn']}'", "It must be 'silu'")
    graph, state = nnx.split(nnx.eval_shape(lambda: Model(config, spec, nnx.Rngs(0))))
    weights = {torch_name(path): (path, weight) for path, weight in nnx.to_flat_state(state)}
    for name in weights:
        if name not in tensors:
            raise UnfilledWeightError(
                PLACE, f"There is no '{name}' in the checkpoint", nearest(name, tensors), name=name
            )
    for name in tensors:
        if name not in weights:
            raise CheckpointForeignError(PLACE, f"It does not have '{name}'", nearest(name, weights), name=name)
    values = []
    for name, (path, weight) in weights.items():
        value = channels_last(tensors[name])
        if value.shape != weight.shape:
            fact = f"'{name}' is {list(value.shape)} with channels last"
            raise CheckpointForeignError(PLACE, fact, f"It must be {list(weight.shape)}", name=name)
        values.append((path, weight.replace(value)))
    return nnx.merge(graph, nnx.from_flat_state(values))


def torch_name(path):
    """Returns the name in PyTorch of a weight, by its path in the modules."""
    *modules, last = path
    return ".".join([*map(str, modules), "bias" if last == "bias" else "weight"])


def channels_last(weight):
    """Returns a weight as Flax has it: (O, I, T, H, W) as (T, H, W, I, O), or as (I, O) where it is of one position."""
    if weight.ndim < 2:
        return weight
    weight = jnp.moveaxis(weight, (0, 1), (-1, -2))
    return weight.reshape(weight.shape[-2:]) if math.prod(weight.shape[:-2]) == 1 else weight
