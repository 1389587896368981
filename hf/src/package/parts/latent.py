def make_latent(attention, c, h):
    """Gives an attention matrices that make queries, keys and values of small vectors, in place of one from the stream."""
    l, heads, d = c["latent"], c["heads"], c["head_size"]
    if l["query"]:
        attention.q_down, attention.q_down_norm = Matrix(l["query"], h), Norm(l["query"])  #? !latent_eps&!latent_raw
        attention.q_down, attention.q_down_norm = Matrix(l["query"], h), Norm(l["query"], l["eps"] or EPS)  #? latent_eps&!latent_raw
        attention.q_down = Matrix(l["query"], h)  #? latent_raw
        attention.q_down_norm = Norm(l["query"]) if l["norm"] else nn.Identity()  #? latent_raw&!latent_eps
        attention.q_down_norm = Norm(l["query"], l["eps"] or EPS) if l["norm"] else nn.Identity()  #? latent_raw&latent_eps
    attention.q_up = Matrix(heads * d, l["query"] or h)
    attention.kv_down, attention.kv_down_norm = Matrix(l["kv"] + l["turned"], h), Norm(l["kv"])  #? !latent_eps&!latent_raw&!latent_keys
    attention.kv_down, attention.kv_down_norm = Matrix(l["kv"] + l["turned"], h), Norm(l["kv"], l["eps"] or EPS)  #? latent_eps&!latent_raw&!latent_keys
    attention.kv_down = Matrix(l["kv"] + l["turned"], h)  #? latent_raw&!latent_keys
    attention.kv_down = Matrix(l["kv"] + l["keys"] * l["turned"], h)  #? latent_keys
    attention.kv_down_norm = Norm(l["kv"])  #? latent_keys&!latent_raw&!latent_eps
    attention.kv_down_norm = Norm(l["kv"], l["eps"] or EPS)  #? latent_keys&!latent_raw&latent_eps
    attention.kv_down_norm = Norm(l["kv"]) if l["norm"] else nn.Identity()  #? latent_raw&!latent_eps
    attention.kv_down_norm = Norm(l["kv"], l["eps"] or EPS) if l["norm"] else nn.Identity()  #? latent_raw&latent_eps
    attention.kv_up = Matrix(heads * (d - l["turned"] + l["value"]), l["kv"])
    attention.qkv, attention.out = None, Projection(h, heads * l["value"])


def latent(attention, x):
    """Queries, keys and values of all heads, not rotated yet; keys of all heads end alike."""  #? !latent_keys
    """Queries, keys and values of all heads, not rotated yet; heads share the ends of keys in groups."""  #? latent_keys
    l, (b, t, _), heads = attention.c["latent"], x.shape, attention.c["heads"]
    q = attention.q_down_norm(F.linear(x, attention.q_down.weight)) if l["query"] else x
    q = F.linear(q, attention.q_up.weight).view(b, t, heads, -1)
    small, shared = F.linear(x, attention.kv_down.weight).split([l["kv"], l["turned"]], -1)  #? !latent_keys
    small, shared = F.linear(x, attention.kv_down.weight).split([l["kv"], l["keys"] * l["turned"]], -1)  #? latent_keys
    shared = shared.view(b, t, l["keys"], -1).repeat_interleave(heads // l["keys"], 2)  #? latent_keys
    up = F.linear(attention.kv_down_norm(small), attention.kv_up.weight).view(b, t, heads, -1)
    k, v = up.split([up.shape[-1] - l["value"], l["value"]], -1)
    return q, torch.cat([k, shared[:, :, None].expand(-1, -1, heads, -1)], -1), v  #? !latent_keys
    return q, torch.cat([k, shared], -1), v  #? latent_keys
#? latent_pairs
#? latent_pairs
def chosen_turns(c, size, device):  #? latent_pairs
    """Turns of the pairs of a latent head, for each head: of its own, or of a longer rotation."""  #? latent_pairs
    pairs = c["latent"] and c["latent"]["pairs"]  #? latent_pairs
    if not pairs:  #? latent_pairs
        return frequencies(size, c["rope"], device)  #? latent_pairs
    turns = frequencies(c["head_size"], c["rope"], device)  #? latent_pairs
    return torch.stack([turns[own] for own in pairs]).repeat_interleave(c["heads"] // len(pairs), 0)  #? latent_pairs
