def make_latent(attention, c, h):
    """Gives an attention matrices that make queries, keys and values of small vectors, in place of one from the stream."""
    l, heads, d = c["latent"], c["heads"], c["head_size"]
    if l["query"]:
        attention.q_down, attention.q_down_norm = Matrix(l["query"], h), Norm(l["query"])  #? !latent_eps
        attention.q_down, attention.q_down_norm = Matrix(l["query"], h), Norm(l["query"], l["eps"] or EPS)  #? latent_eps
    attention.q_up = Matrix(heads * d, l["query"] or h)
    attention.kv_down, attention.kv_down_norm = Matrix(l["kv"] + l["turned"], h), Norm(l["kv"])  #? !latent_eps
    attention.kv_down, attention.kv_down_norm = Matrix(l["kv"] + l["turned"], h), Norm(l["kv"], l["eps"] or EPS)  #? latent_eps
    attention.kv_up = Matrix(heads * (d - l["turned"] + l["value"]), l["kv"])
    attention.qkv, attention.out = None, Projection(h, heads * l["value"])


def latent(attention, x):
    """Queries, keys and values of all heads, not rotated yet; keys of all heads end alike."""
    l, (b, t, _), heads = attention.c["latent"], x.shape, attention.c["heads"]
    q = attention.q_down_norm(F.linear(x, attention.q_down.weight)) if l["query"] else x
    q = F.linear(q, attention.q_up.weight).view(b, t, heads, -1)
    small, shared = F.linear(x, attention.kv_down.weight).split([l["kv"], l["turned"]], -1)
    up = F.linear(attention.kv_down_norm(small), attention.kv_up.weight).view(b, t, heads, -1)
    k, v = up.split([up.shape[-1] - l["value"], l["value"]], -1)
    return q, torch.cat([k, shared[:, :, None].expand(-1, -1, heads, -1)], -1), v
