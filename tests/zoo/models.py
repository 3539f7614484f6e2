"""The table of architectures: what each is made of, and what it's fed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import diffusion

Batch = Callable[[int], dict[str, Tensor]]
WORDS = 37  # size of the vocabulary


@dataclass(frozen=True)
class Architecture:
    """One model and its batches.

    Attributes:
        kind: the family it stands for.
        build: makes the model; called after seeding.
        batch: makes the global keyword arguments of `forward` for B samples, from torch's default generator.
        note: where its config differs in kind, not in size, from what comes by default, and why.
        dtype: float32 where an op has no float64.
        tolerance: above 1e-9 only where the model computes in a narrower type than its parameters'.
        refused: words of the error, where it can't be one program.
        mixes: samples meet by the model's own meaning, so activations may move.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Batch
    note: str = ""
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    refused: str = ""
    mixes: bool = False


# ---- batches


def text(B: int, length: int = 7) -> dict[str, Tensor]:
    """Tokens, of which the later samples have more that don't count."""
    tokens = torch.randint(3, WORDS, (B, length))
    ignored = torch.rand(B, length) < torch.linspace(0.1, 0.5, B)[:, None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)}


def padded(B: int, length: int = 7) -> dict[str, Tensor]:
    """Samples of different lengths."""
    lengths = torch.randint(2, length + 1, (B, 1))
    return {**text(B, length), "attention_mask": (torch.arange(length) < lengths).long()}


def pairs(B: int) -> dict[str, Tensor]:
    """Source and target, of different lengths."""
    source, target = padded(B, 7), text(B, 5)
    return {**source, "labels": target["labels"]}


def images(B: int, size: int = 16, channels: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, channels, size, size), "labels": torch.randint(0, 5, (B,))}


def dense(B: int, size: int = 32) -> dict[str, Tensor]:
    """A class for each pixel."""
    return {"pixel_values": torch.randn(B, 3, size, size), "labels": torch.randint(0, 5, (B, size, size))}


def pixels(B: int, size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, 3, size, size)}


def sound(B: int, length: int = 400) -> dict[str, Tensor]:
    return {"input_values": torch.randn(B, length), "labels": torch.randint(0, 5, (B,))}


def speech(B: int) -> dict[str, Tensor]:
    """A spectrogram and its words."""
    return {"input_features": torch.randn(B, 8, 16), "labels": text(B, 5)["labels"]}


def captions(B: int) -> dict[str, Tensor]:
    return {**pixels(B), **{k: v for k, v in padded(B).items() if k != "labels"}}


def series(B: int) -> dict[str, Tensor]:
    return {"past_values": torch.randn(B, 24, 2), "future_values": torch.randn(B, 8, 2)}


def noisy(B: int) -> dict[str, Tensor]:
    return {"images": torch.randn(B, 3, 8, 8), "labels": torch.randint(0, 5, (B,))}


# ---- models


def hub(name: str, **config: Any) -> Callable[[], nn.Module]:
    """A model of `transformers` by class, from its config's defaults but for `config`."""

    def build() -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers

        kind: Any = getattr(transformers, name)
        return kind(kind.config_class(**config)).train()

    return build


ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
BASE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **ENDS,
}
SIZES: dict[str, Any] = {**BASE, "intermediate_size": 32, "max_position_embeddings": 24}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
LETTERS: dict[str, Any] = {"vocab_size": WORDS, **ENDS}
PATCHES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
VISION: dict[str, Any] = {**PATCHES, "image_size": 16, "patch_size": 8, "num_labels": 5}
BOTH: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 24, "decoder_start_token_id": 0,
    **LETTERS,
}  # fmt: skip
T5: dict[str, Any] = {
    "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, **LETTERS,
}  # fmt: skip
WAVES: dict[str, Any] = {
    **PATCHES, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "num_labels": 5,
    "layerdrop": 0.0, "mask_time_prob": 0.0,
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4,
    "num_labels": 5,
}  # fmt: skip
STILL = "no layers dropped and no spans masked at random: those are branches in Python on random numbers"
GROUPED_MM = "float32: torch's grouped product has no float64"


def architectures() -> list[Architecture]:
    a: Callable[..., Architecture] = Architecture
    single: dict[str, Any] = {
        "tolerance": 1e-6
    }  # float32 inside: the loss of causal models, some norms, softmaxes and rotations
    decoder: Callable[..., Architecture] = partial(a, kind="decoder", batch=text, **single)
    encoder: Callable[..., Architecture] = partial(a, kind="encoder", batch=padded)
    both: Callable[..., Architecture] = partial(a, kind="encoder-decoder", batch=pairs)
    vision: Callable[..., Architecture] = partial(a, kind="vision", batch=images)
    audio: Callable[..., Architecture] = partial(a, kind="audio", batch=sound, note=STILL)
    moe: Callable[..., Architecture] = partial(
        a, kind="experts", batch=text, mixes=True, dtype=torch.float32, tolerance=1e-4, note=GROUPED_MM
    )
    state: Callable[..., Architecture] = partial(a, kind="state space", batch=text, **single)
    neo = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 4}
    narrow = {k: v for k, v in BASE.items() if k not in ("num_hidden_layers", "num_attention_heads")}
    return [
        decoder("gpt2", build=hub("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=4, n_positions=24, **LETTERS)),
        decoder("gpt_neo", build=hub("GPTNeoForCausalLM", **{**narrow, **neo, "max_position_embeddings": 24})),
        decoder(
            "gptj",
            build=hub("GPTJForCausalLM", n_embd=16, n_layer=2, n_head=4, rotary_dim=4, n_positions=24, **LETTERS),
        ),
        decoder("gpt_neox", build=hub("GPTNeoXForCausalLM", **SIZES)),
        decoder(
            "codegen",
            build=hub("CodeGenForCausalLM", n_embd=16, n_layer=2, n_head=4, rotary_dim=4, n_positions=24, **LETTERS),
        ),
        decoder(
            "opt",
            build=hub(
                "OPTForCausalLM", **{**BASE, "ffn_dim": 32, "max_position_embeddings": 24, "word_embed_proj_dim": 16}
            ),
        ),
        decoder("llama", build=hub("LlamaForCausalLM", **GROUPED)),
        decoder("llama_padded", build=hub("LlamaForCausalLM", **GROUPED), batch=padded),
        decoder("mistral", build=hub("MistralForCausalLM", **GROUPED, sliding_window=4)),
        decoder("qwen2", build=hub("Qwen2ForCausalLM", **GROUPED)),
        decoder("qwen3", build=hub("Qwen3ForCausalLM", **GROUPED, head_dim=4)),
        decoder("gemma", build=hub("GemmaForCausalLM", **GROUPED, head_dim=4)),
        decoder("gemma2", build=hub("Gemma2ForCausalLM", **GROUPED, head_dim=4, sliding_window=4)),
        decoder("gemma3", build=hub("Gemma3ForCausalLM", **GROUPED, head_dim=4, sliding_window=4)),
        decoder("phi", build=hub("PhiForCausalLM", **GROUPED)),
        decoder("phi3", build=hub("Phi3ForCausalLM", **GROUPED)),
        decoder("falcon", build=hub("FalconForCausalLM", **BASE)),
        decoder("bloom", build=hub("BloomForCausalLM", n_layer=2, n_head=4, hidden_size=16, **LETTERS)),
        decoder(
            "mpt",
            build=hub(
                "MptForCausalLM", d_model=16, n_heads=4, n_layers=2, max_seq_len=24, expansion_ratio=2, **LETTERS
            ),
        ),
        decoder("olmo", build=hub("OlmoForCausalLM", **GROUPED)),
        decoder("cohere", build=hub("CohereForCausalLM", **GROUPED)),
        decoder("stablelm", build=hub("StableLmForCausalLM", **GROUPED)),
        encoder("bert", build=hub("BertForMaskedLM", **SIZES)),
        encoder("roberta", build=hub("RobertaForMaskedLM", **SIZES)),
        encoder("albert", build=hub("AlbertForMaskedLM", **SIZES, embedding_size=8)),
        encoder(
            "distilbert",
            build=hub(
                "DistilBertForMaskedLM",
                dim=16,
                n_layers=2,
                n_heads=4,
                hidden_dim=32,
                max_position_embeddings=24,
                **LETTERS,
            ),
        ),
        encoder("electra", build=hub("ElectraForMaskedLM", **SIZES, embedding_size=8)),
        encoder(
            "deberta_v2",
            build=hub(
                "DebertaV2ForMaskedLM",
                **SIZES,
                relative_attention=True,
                pos_att_type=["p2c", "c2p"],
                position_buckets=4,
            ),
        ),
        encoder("mpnet", build=hub("MPNetForMaskedLM", **SIZES)),
        encoder(
            "modernbert",
            build=hub("ModernBertForMaskedLM", **SIZES, local_attention=4, cls_token_id=0, sep_token_id=1),
            **single,
        ),
        encoder(
            "fnet",
            build=hub("FNetForMaskedLM", **{k: v for k, v in SIZES.items() if k != "num_attention_heads"}),
            batch=text,
            dtype=torch.float32,
            tolerance=1e-4,
        ),
        encoder("xlnet", build=hub("XLNetLMHeadModel", d_model=16, n_layer=2, n_head=4, d_inner=32, **LETTERS)),
        encoder("convbert", build=hub("ConvBertForMaskedLM", **SIZES, embedding_size=8, conv_kernel_size=3)),
        both("t5", build=hub("T5ForConditionalGeneration", **T5)),
        both("mt5", build=hub("MT5ForConditionalGeneration", **T5)),
        both("bart", build=hub("BartForConditionalGeneration", **BOTH)),
        both("mbart", build=hub("MBartForConditionalGeneration", **BOTH)),
        both("pegasus", build=hub("PegasusForConditionalGeneration", **BOTH)),
        vision("vit", build=hub("ViTForImageClassification", **VISION)),
        vision("deit", build=hub("DeiTForImageClassification", **VISION)),
        vision("beit", build=hub("BeitForImageClassification", **VISION, use_relative_position_bias=True)),
        vision("dinov2", build=hub("Dinov2ForImageClassification", **{**VISION, "intermediate_size": 16})),
        vision("swin", build=hub("SwinForImageClassification", **WINDOWS)),
        vision(
            "convnext",
            build=hub(
                "ConvNextForImageClassification",
                hidden_sizes=[8, 16],
                depths=[1, 1],
                num_stages=2,
                patch_size=2,
                num_labels=5,
            ),
        ),
        vision(
            "resnet",
            build=hub(
                "ResNetForImageClassification",
                embedding_size=8,
                hidden_sizes=[8, 16],
                depths=[1, 1],
                layer_type="basic",
                num_labels=5,
            ),
        ),
        vision(
            "mobilenet_v2",
            build=hub("MobileNetV2ForImageClassification", depth_multiplier=0.25, image_size=64, num_labels=5),
            batch=partial(
                images, size=64
            ),  # of 32, the deepest norms see six numbers a channel: one ulp in a weight grows to 5e-10
        ),
        vision(
            "segformer",
            build=hub(
                "SegformerForSemanticSegmentation",
                num_encoder_blocks=2,
                depths=[1, 1],
                sr_ratios=[2, 1],
                hidden_sizes=[8, 16],
                patch_sizes=[7, 3],
                strides=[4, 2],
                num_attention_heads=[1, 2],
                mlp_ratios=[2, 2],
                decoder_hidden_size=8,
                num_labels=5,
            ),
            batch=dense,
        ),
        vision(
            "vit_mae",
            build=hub(
                "ViTMAEForPreTraining",
                **PATCHES,
                image_size=16,
                patch_size=4,
                decoder_num_attention_heads=4,
                decoder_hidden_size=16,
                decoder_num_hidden_layers=1,
                decoder_intermediate_size=32,
            ),
            batch=pixels,
        ),
        audio("wav2vec2", build=hub("Wav2Vec2ForSequenceClassification", **WAVES)),
        audio("hubert", build=hub("HubertForSequenceClassification", **WAVES)),
        audio("wavlm", build=hub("WavLMForSequenceClassification", **WAVES, num_buckets=8, max_bucket_distance=8)),
        audio(
            "whisper",
            build=hub(
                "WhisperForConditionalGeneration",
                **{k: v for k, v in BOTH.items() if k != "max_position_embeddings"},
                num_mel_bins=8,
                max_source_positions=8,
                max_target_positions=8,
            ),
            batch=speech,
            note="",
        ),
        moe("mixtral", build=hub("MixtralForCausalLM", **GROUPED, num_local_experts=4)),
        moe(
            "qwen2_moe",
            build=hub(
                "Qwen2MoeForCausalLM",
                **GROUPED,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
            ),
        ),
        moe(
            "switch",
            build=hub(
                "SwitchTransformersForConditionalGeneration",
                **T5,
                num_experts=4,
                expert_capacity=4,
                num_sparse_encoder_layers=1,
                num_sparse_decoder_layers=1,
            ),
            batch=pairs,
            refused="the course of the step depends on the value of a traced tensor",
        ),
        moe(
            "deepseek_v3",
            build=hub(
                "DeepseekV3ForCausalLM",
                **{
                    **SIZES,
                    "n_routed_experts": 4,
                    "n_group": 2,
                    "topk_group": 1,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 16,
                    "q_lora_rank": 8,
                    "kv_lora_rank": 8,
                    "qk_rope_head_dim": 4,
                    "qk_nope_head_dim": 4,
                    "v_head_dim": 4,
                    "first_k_dense_replace": 1,
                },
            ),
        ),
        state("mamba", build=hub("MambaForCausalLM", hidden_size=16, state_size=4, num_hidden_layers=2, **LETTERS)),
        state(
            "mamba2",
            build=hub(
                "Mamba2ForCausalLM",
                hidden_size=16,
                state_size=4,
                num_hidden_layers=2,
                num_heads=4,
                head_dim=8,
                n_groups=2,
                chunk_size=4,
                **LETTERS,
            ),
        ),
        state(
            "rwkv",
            build=hub(
                "RwkvForCausalLM",
                hidden_size=16,
                attention_hidden_size=16,
                num_hidden_layers=2,
                context_length=16,
                **LETTERS,
            ),
        ),
        a(
            "clip",
            "multimodal",
            hub("CLIPModel", projection_dim=8, text_config=SIZES, vision_config={**VISION, "hidden_size": 16}),
            captions,
            mixes=True,
        ),
        a("siglip", "multimodal", hub("SiglipModel", text_config=SIZES, vision_config=VISION), captions, mixes=True),
        a(
            "patchtst",
            "time series",
            hub(
                "PatchTSTForPrediction",
                d_model=16,
                ffn_dim=32,
                num_input_channels=2,
                context_length=24,
                prediction_length=8,
                patch_length=8,
                patch_stride=8,
                num_attention_heads=4,
                num_hidden_layers=2,
            ),
            series,
        ),
        a("unet", "diffusion", diffusion.UNet, noisy),
        a("dit", "diffusion", diffusion.DiT, noisy),
    ]


ZOO: dict[str, Architecture] = {a.name: a for a in architectures()}
