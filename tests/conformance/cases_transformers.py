"""Tiny random Hugging Face models."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from harness import Case, case
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

VOCAB = 64


class Transformer(Case):
    """Four steps of a language model on random tokens."""

    strategy = dict(auto_wrap_policy="auto")

    def build(self) -> None:
        self.net = self.model()

    def model(self) -> nn.Module:
        raise NotImplementedError

    def tokens(self, batch: Tensor) -> Tensor:
        return (batch.abs() * 20).long().clamp(max=VOCAB - 1)

    def loss(self, batch: Tensor) -> Tensor:
        ids = self.tokens(batch)
        return self.net(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


SMALL = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)


@case
class Gpt2(Transformer):
    def model(self) -> nn.Module:
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        )


@case
class Gpt2ByLayers(Gpt2):
    strategy = dict(auto_wrap_policy=["GPT2Block"])


@case
class Gpt2Checkpointed(Gpt2):
    strategy = dict(auto_wrap_policy=["GPT2Block"])

    def model(self) -> nn.Module:
        model = super().model()
        model.gradient_checkpointing_enable()
        return model


@case
class Llama(Transformer):
    strategy = dict(auto_wrap_policy=["LlamaDecoderLayer"])

    def model(self) -> nn.Module:
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=1)
        )


@case
class Mixtral(Transformer):
    strategy = dict(auto_wrap_policy=["MixtralDecoderLayer"])

    def model(self) -> nn.Module:
        return hf.MixtralForCausalLM(
            hf.MixtralConfig(
                **SMALL,
                intermediate_size=64,
                num_key_value_heads=2,
                num_local_experts=4,
                output_router_logits=True,
            )
        )


@case
class Bert(Transformer):
    strategy = dict(auto_wrap_policy=["BertLayer"])

    def model(self) -> nn.Module:
        return hf.BertForMaskedLM(hf.BertConfig(**SMALL, intermediate_size=64))


@case
class Albert(Transformer):
    strategy = dict(auto_wrap_policy="layers")

    def model(self) -> nn.Module:
        return hf.AlbertForMaskedLM(
            hf.AlbertConfig(**SMALL, embedding_size=16, intermediate_size=64)
        )


@case
class T5(Transformer):
    strategy = dict(auto_wrap_policy=["T5Block"])

    def model(self) -> nn.Module:
        return hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=VOCAB,
                decoder_start_token_id=0,
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
            )
        )


@case
class Bart(Transformer):
    strategy = dict(auto_wrap_policy="layers")

    def model(self) -> nn.Module:
        return hf.BartForConditionalGeneration(
            hf.BartConfig(
                vocab_size=VOCAB,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                max_position_embeddings=32,
            )
        )


@case
class Vit(Transformer):
    strategy = dict(auto_wrap_policy=["ViTLayer"])

    def model(self) -> nn.Module:
        return hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=4,
                patch_size=2,
                num_channels=1,
                num_labels=3,
            )
        )

    def loss(self, batch: Tensor) -> Tensor:
        images = torch.nn.functional.pad(batch, (0, 4)).view(-1, 1, 4, 4)
        return self.net(pixel_values=images, labels=(batch[:, 0] > 0).long()).loss


@case
class Mamba(Transformer):
    strategy = dict(auto_wrap_policy=["MambaBlock"])

    def model(self) -> nn.Module:
        return hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2)
        )


@case
class Lora(Llama):
    def model(self) -> nn.Module:
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        return get_peft_model(super().model(), config)


@case
class LoraCheckpointed(Llama):
    def model(self) -> nn.Module:
        model = super().model()
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
