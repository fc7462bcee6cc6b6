"""What a whole script of Tencent's HunyuanVideo-1.5 needs beside the patches of its networks."""

import importlib.util

import torch

import torchport

CPU = torch.device("cpu")


def created_on_host(original, cls, *args, **kwargs):
    """Returns upstream's pipeline with everything on the host.

    Args:
        original: Upstream's class method.
        cls: The pipeline's class.
        *args: The checkpoint and the variant.
        **kwargs: Their dtype, and two devices, which are CUDA's.
    """
    pipe = original(cls, *args, **{**kwargs, "device": CPU, "transformer_init_device": CPU})
    pipe.execution_device = CPU
    # Upstream writes 1152, its published network's; without an image it makes so many zeros for it.
    pipe.register_to_config(vision_states_dim=pipe.transformer.config.vision_states_dim)
    return pipe


def with_programs(original, self, *args, **kwargs):
    """Calls upstream's pipeline with its transformer and its decoder compiled.

    Args:
        original: Upstream's method.
        self: The pipeline.
        *args: What it is called with.
        **kwargs: Likewise.
    """
    if not hasattr(self.transformer, "compiled"):
        # ByT5's embeddings are in a dict here; a run passes them by name.
        glyphs = {"match": r"extra_kwargs\.byt5_text_(states|mask)", "spec": ["dp"]}
        ported = torchport.port(self.transformer, component="transformer", inputs=[glyphs])
        if ported is not self.transformer:  # it is, where the original is asked for
            ported.register_forward_pre_hook(_with_tables, with_kwargs=True)
        self.transformer = ported
        self.vae.decoder = torchport.port(self.vae.decoder, component="vae")
    return original(self, *args, **kwargs)


def _with_tables(transformer, args, kwargs):
    """Returns a call of the transformer with its rotary tables: computed inside, they would be large constants."""
    cos, sin = transformer.get_rotary_pos_embed(args[0].shape[2:])
    return args, {**kwargs, "freqs_cos": cos, "freqs_sin": sin}


def without_ffmpeg():
    """Returns whether imageio writes videos with PyAV here."""
    return importlib.util.find_spec("imageio_ffmpeg") is None


def with_codec(original, uri, ims, format=None, **kwargs):
    """Writes pictures into a file; into an MP4 as H.264, as imageio-ffmpeg does.

    Args:
        original: imageio's function.
        uri: The file.
        ims: The pictures.
        format: Its format, where the name does not say it.
        **kwargs: For the plugin.
    """
    if str(uri).endswith(".mp4"):
        kwargs.setdefault("codec", "libx264")
    return original(uri, ims, format, **kwargs)
