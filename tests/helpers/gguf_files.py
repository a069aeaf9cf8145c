"""GGUF files, written by the package that reads them."""

import gguf


def write_gguf(model, file, tokens=None):
    """Write a Llama with tied embeddings; `tokens` are those of its tokenizer, by id."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        special = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
        writer.add_token_types([special[not one.startswith("<")] for one in tokens])
        # Two, for an array of one comes back from older readers as a string.
        writer.add_token_merges(["0 1", "1 0"])
        writer.add_eos_token_id(tokens.index("<eos>"))
        writer.add_bos_token_id(tokens.index("<bos>"))
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    state = model.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in parts.items():
            value = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in heads:
                # GGUF keeps rotary pairs next to each other, transformers in two halves.
                rows, columns = value.shape
                value = value.view(heads[theirs], 2, -1, columns).transpose(1, 2)
                value = value.reshape(rows, columns)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
