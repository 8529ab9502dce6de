"""Makes a tiny random model, with a byte tokenizer: `make_model.py DIRECTORY [KIND [SEED]]`.

KIND is `llama`, `llama3`, which has three layers, `gemma3`, whose layers have sliding windows and
full attention in turn, `mistral`, whose layers all have sliding windows, `mamba`, or `blip2`, which
takes an image with a prompt.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipImageProcessorPil,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.vllm.engine_process import IMAGE_PIXELS, IMAGE_TOKENS

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # large enough for keys and values to matter
}


def main(directory: str, kind: str = "llama", seed: str = "7") -> None:
    torch.manual_seed(int(seed))
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(
            **SIZES, num_hidden_layers=4, sliding_window=64, layer_types=layers
        )
        Gemma3ForCausalLM(config).save_pretrained(directory)
    elif kind == "mistral":
        config = MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=64)
        MistralForCausalLM(config).save_pretrained(directory)
    elif kind == "mamba":
        sizes = {"hidden_size": 64, "state_size": 16, "num_hidden_layers": 2}
        config = MambaConfig(vocab_size=SIZES["vocab_size"], **sizes)
        MambaForCausalLM(config).save_pretrained(directory)
    elif kind == "blip2":
        towers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        towers |= {"num_attention_heads": 2, "initializer_range": 0.2}
        text = LlamaConfig(**SIZES, num_hidden_layers=2, architectures=["LlamaForCausalLM"])
        config = Blip2Config(
            vision_config={**towers, "image_size": IMAGE_PIXELS, "patch_size": 8},
            qformer_config={**towers, "encoder_hidden_size": 32, "vocab_size": 8},
            text_config=text.to_dict(),
            num_query_tokens=IMAGE_TOKENS,
            image_token_index=SIZES["vocab_size"] - 1,
            initializer_range=0.2,
            dtype="float32",
        )
        model = Blip2ForConditionalGeneration(config)
        torch.nn.init.normal_(model.query_tokens)
        model.save_pretrained(directory)
    else:
        num_layers = 3 if kind == "llama3" else 2
        LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=num_layers)).save_pretrained(
            directory
        )
    names = ["<pad>", "<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "blip2":  # its vocabulary ends with <image>
        tokenizer.add_tokens([f"<{i}>" for i in range(len(names), SIZES["vocab_size"] - 1)])
        tokenizer.add_special_tokens(["<image>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    fast.save_pretrained(directory)
    if kind == "blip2":
        images = BlipImageProcessorPil(size={"height": IMAGE_PIXELS, "width": IMAGE_PIXELS})
        Blip2Processor(images, fast, num_query_tokens=IMAGE_TOKENS).save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
