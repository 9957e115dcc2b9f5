"""Models of pictures and sounds, and of both with texts, of transformers and diffusers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import Case, Cases, backward, from_hub
from .texts import HEADS, LENGTH, SPECIAL, VOCABULARY, WIDTH, tokens

BATCH, SIZE, PATCH, CLASSES = 16, 64, 8, 10
TOWER = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
}
VISION = {**TOWER, "image_size": SIZE, "patch_size": PATCH}


def images(batch: int = BATCH, size: int = SIZE, channels: int = 3) -> Tensor:
    """Random pictures."""
    return torch.randn(batch, channels, size, size)


def classes(batch: int = BATCH) -> Tensor:
    """Random classes."""
    return torch.randint(0, CLASSES, (batch,))


def _hf() -> Any:
    import transformers

    return transformers


def sorter(name: str, batch: int = BATCH, size: int = SIZE, **config: Any) -> Case:
    """A model of transformers that sorts pictures."""
    hf = _hf()
    settings = getattr(hf, f"{name}Config")(num_labels=CLASSES, **config)
    model = getattr(hf, f"{name}ForImageClassification")(settings)
    return from_hub(model, pixel_values=images(batch, size), labels=classes(batch))


def vit() -> Case:
    """ViT."""
    return sorter("ViT", **VISION)


def dinov2() -> Case:
    """DINOv2: each branch has a learnt scale."""
    sizes = {key: value for key, value in VISION.items() if key != "intermediate_size"}
    return sorter("Dinov2", **sizes)


def swin() -> Case:
    """Swin: attention in shifted windows."""
    return sorter("Swin", image_size=SIZE, patch_size=4, embed_dim=48, depths=[2, 2, 2],
                  num_heads=[2, 4, 8], window_size=4)  # fmt: skip


def convnext() -> Case:
    """ConvNeXt with stochastic depth."""
    return sorter("ConvNext", hidden_sizes=[32, 64, 128], depths=[2, 2, 2], num_stages=3,
                  drop_path_rate=0.1)  # fmt: skip


def resnet() -> Case:
    """A ResNet with bottlenecks."""
    return sorter("ResNet", embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2])


def regnet() -> Case:
    """RegNet: grouped convolutions, squeeze and excitation."""
    return sorter("RegNet", embedding_size=32, hidden_sizes=[32, 64, 128], depths=[2, 2, 2],
                  groups_width=16)  # fmt: skip


def mobilenet() -> Case:
    """MobileNetV2: convolutions of one channel each."""
    return sorter("MobileNetV2", depth_multiplier=0.5, image_size=SIZE)


def segformer() -> Case:
    """SegFormer names a class for each pixel."""
    hf = _hf()
    config = hf.SegformerConfig(num_labels=CLASSES, hidden_sizes=[32, 64, 128, 160])
    labels = torch.randint(0, CLASSES, (8, 128, 128))
    model = hf.SegformerForSemanticSegmentation(config)
    return from_hub(model, pixel_values=images(8, 128), labels=labels)


def vit_mae() -> Case:
    """A masked autoencoder: a quarter of the patches, drawn at random, is seen."""
    hf = _hf()
    decoder = {"decoder_hidden_size": 64, "decoder_num_hidden_layers": 2}
    more = {"decoder_num_attention_heads": HEADS, "decoder_intermediate_size": 4 * 64}
    model = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**VISION, **decoder, **more))
    return from_hub(model, pixel_values=images(32))


def whisper() -> Case:
    """Whisper writes down speech."""
    hf = _hf()
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH, max_source_positions=200, max_target_positions=LENGTH,
        use_cache=False, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        **SPECIAL,
    )  # fmt: skip
    sounds = torch.randn(8, 80, 400)
    model = hf.WhisperForConditionalGeneration(config)
    return from_hub(model, input_features=sounds, labels=tokens(64, 8))


def wav2vec2() -> Case:
    """wav2vec 2.0 with CTC: convolutions over samples, layers left out at random."""
    hf = _hf()
    config = hf.Wav2Vec2Config(
        vocab_size=40, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, conv_dim=(64,) * 7, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, mask_time_length=2, pad_token_id=0,
    )  # fmt: skip
    labels = torch.randint(3, 40, (8, 12))
    return from_hub(hf.Wav2Vec2ForCTC(config), input_values=torch.randn(8, 16000), labels=labels)


def spectrogram() -> Case:
    """The audio spectrogram transformer sorts sounds."""
    hf = _hf()
    config = hf.ASTConfig(**TOWER, num_mel_bins=64, max_length=128, num_labels=CLASSES)
    model = hf.ASTForAudioClassification(config)
    return from_hub(model, input_values=torch.randn(8, 128, 64), labels=classes(8))


def _pair(name: str, **texts: Any) -> Case:
    hf = _hf()
    text = {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 32, **SPECIAL, **texts}
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=dict(VISION))
    batch: dict[str, Any] = {"input_ids": tokens(32), "pixel_values": images(), "return_loss": True}
    return from_hub(getattr(hf, f"{name}Model")(config), **batch)


def clip() -> Case:
    """CLIP pairs texts and pictures."""
    return _pair("CLIP", projection_dim=64)


def siglip() -> Case:
    """SigLIP pairs them with a loss of its own."""
    return _pair("Siglip")


def llava() -> Case:
    """LLaVA: a language model reads what a vision tower sees."""
    hf = _hf()
    seen = (SIZE // PATCH) ** 2
    text = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=3,
        num_attention_heads=HEADS, use_cache=False, **SPECIAL,
    )  # fmt: skip
    vision = hf.CLIPVisionConfig(**VISION)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=3)
    words = tokens(LENGTH, 8) % (VOCABULARY - 4) + 4
    words[:, 1 : 1 + seen] = 3
    model = hf.LlavaForConditionalGeneration(config)
    return from_hub(model, input_ids=words, pixel_values=images(8), labels=words)


def _denoise(network: Any, target: Tensor, **batch: Any) -> Case:
    """The network is compiled by itself; the loss is taken outside, as the scripts do."""

    def run(model: Any) -> None:
        predicted = model(**batch, return_dict=False)[0]
        backward(F.mse_loss(predicted.float(), target))

    return Case((network.train(),), run, (*batch.values(), target))


def unet() -> Case:
    """A U-Net that is told a text, as Stable Diffusion has it."""
    diffusers = importlib.import_module("diffusers")
    network = diffusers.UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=64,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=8,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    noisy, steps = images(8, 32, 4), torch.randint(0, 1000, (8,))
    texts = torch.randn(8, 16, 64)
    return _denoise(network, images(8, 32, 4), sample=noisy, timestep=steps,
                    encoder_hidden_states=texts)  # fmt: skip


def dit() -> Case:
    """DiT: a transformer whose norms follow time and class."""
    diffusers = importlib.import_module("diffusers")
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=32, in_channels=4, out_channels=4, num_layers=4,
        sample_size=32, patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4,
    )  # fmt: skip
    steps = torch.randint(0, 1000, (8,))
    return _denoise(network, images(8, 32, 4), hidden_states=images(8, 32, 4), timestep=steps,
                    class_labels=torch.randint(0, 1000, (8,)))  # fmt: skip


def flux() -> Case:
    """FLUX: texts and picture attend together."""
    diffusers = importlib.import_module("diffusers")
    network = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=64, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    where, words = torch.zeros(256, 3), torch.zeros(16, 3)
    where[:, 1], where[:, 2] = torch.arange(256) // 16, torch.arange(256) % 16
    return _denoise(
        network, torch.randn(8, 256, 16), hidden_states=torch.randn(8, 256, 16),
        encoder_hidden_states=torch.randn(8, 16, 64), pooled_projections=torch.randn(8, 32),
        timestep=torch.rand(8), img_ids=where, txt_ids=words, guidance=torch.ones(8),
    )  # fmt: skip


def vae() -> Case:
    """The autoencoder of latent diffusion: an encoder, a sample, a decoder."""
    diffusers = importlib.import_module("diffusers")
    network = diffusers.AutoencoderKL(
        block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    pictures = images(4, 64)
    return _denoise(network.train(), pictures, sample=pictures, sample_posterior=True)


PICTURES: Cases = {
    one.__name__: one
    for one in (
        vit, dinov2, swin, convnext, resnet, regnet, mobilenet, segformer, vit_mae, whisper,
        wav2vec2, spectrogram, clip, siglip, llava, unet, dit, flux, vae,
    )
}  # fmt: skip
