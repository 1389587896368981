class Weight(nn.Module):
    """A tensor under a name; a bias or a shared tensor beside it is another attribute."""

    def __init__(self, begins):
        super().__init__()
        self.weight = nn.Parameter(begins)


def picked(shape, columns, place, step):
    """Row t is 1 at `place + t · step`, counted around, and 0 elsewhere."""
    rows = torch.zeros(shape).reshape(-1, columns)
    t = torch.arange(len(rows))
    rows[t, (place + t * step) % columns] = 1.0
    return rows.reshape(shape)


def rms(x, eps, inner=1):
    """x / sqrt(mean(x²) + eps), the mean over the last `inner` dimensions (RMSNorm, 1910.07467)."""
    over = tuple(range(-inner, 0))
    return x * torch.rsqrt(x.square().mean(over, keepdim=True) + eps)


def turn(x, angle):
    """Pairs (i, i + d/2) of the last dimension turned by `angle` (RoPE, 2104.09864)."""
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def frequencies(pairs, base, device):
    return base ** (-torch.arange(pairs, dtype=torch.float64, device=device) / pairs)


def linear_frequencies(f, base, factor):
    return f / factor


def llama3_frequencies(f, base, factor, low, high, context):
    """Long wavelengths divided by `factor`, short ones kept, those between mixed (Llama 3.1)."""
    ratio = context * f / (2 * math.pi)
    smooth = ((ratio - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * f / factor + smooth * f


def yarn_frequencies(f, base, factor, fast, slow, context, truncate):
    """Pairs that turn rarely divided by `factor` (YaRN, 2309.00071)."""
    pairs = len(f)
    turning = lambda times: pairs * math.log(context / times / (2 * math.pi)) / math.log(base)
    low, high = turning(fast), turning(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    wide = 1e-3 if low == high else high - low
    divided = ((torch.arange(pairs, dtype=f.dtype, device=f.device) - low) / wide).clamp(0, 1)
    return f / factor * divided + f * (1 - divided)


def rope(x, position, base, scaled=None):
    """Turns each row by the position of its token."""
    f = frequencies(x.shape[-1] // 2, base, x.device)
    f = f if scaled is None else scaled(f, base)
    position = position.reshape(position.shape + (1,) * (x.dim() - position.dim()))
    return turn(x, position * f)


def chosen_rope(x, position, base, pairs, of, scaled=None):
    """Turns each row by the position of its token, at the frequencies of these pairs of a rotation of `of` (2502.14837)."""
    f = frequencies(of, base, x.device)
    f = (f if scaled is None else scaled(f, base))[pairs]
    position = position.reshape(position.shape + (1,) * (x.dim() - position.dim()))
    return turn(x, position * f)


def rope_depth(x, depth, depths, base, half_reversed, scaled=None):
    """Turns by depth; where `half_reversed`, odd pairs count backwards from the last depth."""
    f = frequencies(x.shape[-1] // 2, base, x.device)
    f = f if scaled is None else scaled(f, base)
    position = torch.full_like(f, depth)
    if half_reversed:
        position[1::2] = depths - 1 - depth
    return turn(x, position * f)


def causal(q, k, window=None, segments=None, positions=None, every=None, among=None):
    """Which keys a query sees: [batch or 1, heads or 1, queries, keys]."""
    if positions is None:
        i = torch.arange(q.shape[1], device=q.device)[None, :, None]
        j = torch.arange(k.shape[1], device=q.device)[None, None, :]
        seen = j <= i
    else:
        i, j = positions[0][:, :, None], positions[1][:, None, :]
        seen = (j <= i) & (j >= 0)
    if window is not None:
        seen = seen & (i - j < window)
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    if every is not None:
        seen = seen & ((j + 1) % every == 0)
    seen = seen[:, None]
    if among is not None:
        chosen, block = among
        of_key = torch.div(j, block, rounding_mode="floor")[:, :, None, :, None]
        read = (chosen[:, :, :, None, :] == of_key).any(-1).transpose(1, 2)
        seen = seen & read.repeat_interleave(q.shape[2] // read.shape[1], 1)
    return seen


def choose_keys(
    q, k, seen, block, count, lists, scale=1.0, measure="products", near=0, first=0, weights=None, positions=None
):
    """The numbers of `count` blocks for each list of heads, increasing, -1 for none."""
    q, k = q.detach(), k.detach().repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if measure == "relu":
        s = F.relu(s)
    elif measure == "softmax":
        s = torch.where(seen, s, -math.inf).softmax(-1).nan_to_num()
    if weights is not None:
        s = s * weights.detach().transpose(1, 2)[..., None]
    s = s.reshape(s.shape[0], lists, -1, *s.shape[2:]).sum(2)
    i = torch.arange(q.shape[1], device=q.device)[None] if positions is None else positions[0]
    j = torch.arange(k.shape[1], device=q.device)[None] if positions is None else positions[1]
    of_key = torch.div(j, block, rounding_mode="floor").clamp(min=0)
    own = torch.div(i, block, rounding_mode="floor")[:, None, :, None]
    blocks = torch.arange(max(int(of_key.max()) + 1, count), device=q.device)
    score = s.new_full((*s.shape[:3], len(blocks)), -math.inf)
    s = torch.where(seen, s, -math.inf)
    score = score.scatter_reduce(-1, of_key[:, None, None].expand(s.shape), s, "amax")
    forced = (blocks > own - near) | (blocks < first)
    score = torch.where(forced & (blocks <= own), math.inf, score)
    score, chosen = score.sort(dim=-1, descending=True, stable=True)
    chosen = torch.where(score[..., :count] > -math.inf, chosen[..., :count], len(blocks)).sort(-1)[0]
    return torch.where(chosen < len(blocks), chosen, -1).transpose(1, 2)


def of_chosen(x, seen, among, positions, absent):
    """The sum over the keys of each chosen block, [batch, seq, lists, count]; `absent` where none is seen. `x` is of lists and keys."""
    chosen, block = among
    j = torch.arange(x.shape[-1], device=x.device)[None] if positions is None else positions[1]
    of_key = torch.div(j, block, rounding_mode="floor")[:, None, None, None]
    # Heads of a list see the same keys.
    seen = seen[:, :: seen.shape[1] // x.shape[1]].transpose(1, 2)
    read = (chosen[..., None] == of_key) & seen[:, :, :, None]
    total = torch.where(read, x.transpose(1, 2)[:, :, :, None], 0).sum(-1)
    return torch.where(read.any(-1), total, absent)


def key_mass(q, k, lse, seen, scale, among, positions=None):
    """How much of attention's weights the heads of a list give to each chosen block, without a gradient."""
    q, k, lse = q.detach(), k.detach().repeat_interleave(q.shape[2] // k.shape[2], 2), lse.detach()
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    p = torch.where(seen, torch.exp(s - lse.transpose(1, 2)[..., None]), 0)
    p = p.reshape(p.shape[0], among[0].shape[2], -1, *p.shape[2:]).sum(2)
    return of_chosen(p, seen, among, positions, 0.0)


def key_scores(q, k, seen, scale, among, relu=False, weights=None, positions=None):
    """The scores by which tokens were chosen, -1e20 where there is none."""
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
    s = F.relu(s) if relu else s
    s = s if weights is None else s * weights.transpose(1, 2)[..., None]
    s = s.reshape(s.shape[0], among[0].shape[2], -1, *s.shape[2:]).sum(2)
    return of_chosen(s, seen, among, positions, -1e20)


def attention(q, k, v, scale, seen=None):
    """softmax(q k^T scale) v of the keys `seen`, or all up to the query; [batch, seq, heads, size]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
    )
    return o.transpose(1, 2)


def scored_attention(q, k, v, scale, seen, score=None, mask=None, positions=None, dropout=0.0):
    """Attention with a score and a mask of each pair; the result, and the log of the softmax's sum."""
    each = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(each, 2), v.repeat_interleave(each, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if positions is None:
        i = torch.arange(q.shape[1], device=q.device)[:, None]
        j = torch.arange(k.shape[1], device=q.device)[None, :]
    else:
        i, j = positions[0][:, None, :, None], positions[1][:, None, None, :]
    head = torch.arange(q.shape[2], device=q.device)[:, None, None]
    if score is not None:
        s = score(s, i, j, head)
    if mask is not None:
        seen = seen & (mask(i, j, head) > 0)
    s = torch.where(seen, s, -1e30)
    lse = s.logsumexp(-1)
    p = torch.where(seen, torch.exp(s - lse[..., None]), 0)
    lse = torch.where(seen.any(-1).expand(lse.shape), lse, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", F.dropout(p, dropout), v), lse.transpose(1, 2)


def at_query(x):
    """Numbers of tokens, and of heads, where a score is of the query."""
    return x[:, None, :, None] if x.dim() == 2 else x.transpose(1, 2)[..., None]


def at_key(x):
    """Numbers of tokens, and of heads, where a score is of the key."""
    return x[:, None, None, :] if x.dim() == 2 else x.transpose(1, 2)[:, :, None, :]


def look_up(table, index, head=None):
    """The entry of a table at an index, or the nearest that there is."""
    index = index.floor().long().clamp(0, table.shape[-1] - 1)
    return table[index] if head is None else table[head, index]


def number(x):
    """A number as a tensor."""
    return torch.tensor(float(x))


def truth(x):
    """1 where it holds, else 0."""
    return x.to(torch.get_default_dtype())


def depth_attention(q, k, v, row, scale, softcap=None, window=None):
    """For one token, attention to rows 0..row of a cache [depth, ..., heads, size]."""
    first = 0 if window is None else max(0, row + 1 - window)
    each = q.shape[-2] // k.shape[-2]
    k, v = (x[first : row + 1].repeat_interleave(each, -2) for x in (k, v))
    s = (q * k).sum(-1) * scale
    if softcap is not None:
        s = torch.where(s < -1e20, s, softcap * torch.tanh(s / softcap))
    return (s.softmax(0)[..., None] * v).sum(0)


def read_sources(sources, x, q, row, eps):
    """softmax_j(q · RMSNorm(v_j)) v_j over rows 0..row of the sources, and x (Attention Residuals)."""
    v = torch.cat([sources[:row], x[None]])
    p = (rms(v, eps) * q).sum(-1).softmax(0)
    return (p[..., None] * v).sum(0)


def write(cache, value, row):
    """The cache with that row replaced."""
    return torch.cat([cache[:row], value[None], cache[row + 1 :]])


def route(z, k):
    """The k largest, the largest first, ties to the lowest index."""
    return z.argsort(dim=-1, descending=True, stable=True)[..., :k]


def group(chosen, experts):
    """Slots sorted by expert; where each expert's begin; where each slot went."""
    of = chosen.flatten().clamp(max=experts)
    order = of.argsort(stable=True)
    sizes = torch.bincount(of, minlength=experts + 1)[:experts]
    offsets = F.pad(sizes.cumsum(0), (1, 0))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, offsets, inverse.reshape(chosen.shape)


def gather(x, order):
    """Rows of tokens in the order of slots."""
    x = x.reshape(-1, x.shape[-1])
    return x[order // (len(order) // len(x))]


def grouped(x, w, offsets):
    """Each row times the matrix [out, in] of its expert; rows of no expert are zero."""
    ends = offsets.tolist()
    parts = [F.linear(x[a:b], w[e]) for e, (a, b) in enumerate(zip(ends, ends[1:]))]
    return F.pad(torch.cat(parts), (0, 0, 0, len(x) - ends[-1]))


def scatter(d, chosen, n):
    """Values at the chosen of n entries, zero elsewhere."""
    return d.new_zeros(d.shape[:-1] + (n,)).scatter_add(-1, chosen, d)


def combine(y, inverse, gates=None):
    """The sum over a token's slots, each times its gate."""
    y = y[inverse]
    return (y if gates is None else y * gates[..., None]).sum(-2)


def round_groups(score, chosen, order, offsets, tile, spare, none):
    """Choices with as many of each expert as fill tiles; all others are `none`."""
    k, experts = chosen.shape[-1], len(offsets) - 1
    score, flat = score.flatten(), chosen.flatten()
    kept = torch.where(flat < experts, none, flat)
    for e in range(experts):
        slots = order[offsets[e] : offsets[e + 1]].sort().values
        slots = slots[score[slots].argsort(descending=True, stable=True)]
        is_spare = slots % k + spare >= k
        own, others = slots[~is_spare], slots[is_spare]
        over = len(own) % tile
        missing = tile - over
        if over > 0 and missing <= over and missing <= len(others):
            own = torch.cat([own, others[:missing]])
        else:
            own = own[: len(own) - over]
        kept[own] = e
    return kept.reshape(chosen.shape)


def top_tokens(r, capacity):
    """Places of the largest share of each sequence, in order (expert choice, 2404.02258)."""
    best = r.argsort(dim=1, descending=True, stable=True)
    return best[:, : share(capacity, r.shape[1])].sort(1).values


def share(capacity, tokens):
    """How many of so many tokens take part."""
    return max(1, int(capacity * tokens + 1e-9))


def take_tokens(x, index):
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def put_tokens(x, index, tokens):
    """Rows put at those places; zero elsewhere, -1 of integers."""
    rows = x.new_full((x.shape[0], tokens) + x.shape[2:], 0 if x.is_floating_point() else -1)
    return rows.index_put((torch.arange(len(x), device=x.device)[:, None], index), x)


def decide(z, inclusive):
    """Each token's own place where z is above zero; -1 elsewhere."""
    place = torch.arange(z.shape[1], device=z.device)
    return torch.where(z >= 0 if inclusive else z > 0, place, -1)


def keep(x, places, otherwise=0):
    """Rows of tokens that take part; `otherwise` in all others."""
    taking = (places >= 0).reshape(places.shape + (1,) * (x.dim() - 2))
    return torch.where(taking, x, otherwise)


def runs(places, documents, begins):
    """The number of the run that each token is in; a token that takes part begins or ends one."""
    cut = places >= 0
    cut = cut if begins else F.pad(cut[:, :-1], (1, 0))
    cut = cut | F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return F.pad(cut[:, 1:], (1, 0)).cumsum(1)


def before(segments, by):
    """The token so many before of those that take part, of the same document; -1 for none."""
    taking = segments >= 0
    place = torch.arange(segments.shape[1], device=segments.device)
    rank = taking.cumsum(1) - 1
    # The place of the token of each rank, and back.
    order = torch.where(taking, place, segments.shape[1]).sort(1).values
    wanted = (rank - by).clamp(min=0)
    at = order.gather(1, wanted).clamp(max=segments.shape[1] - 1)
    same = segments.gather(1, at) == segments
    # Documents are contiguous: the one between is of the same where both ends are.
    return torch.where(taking & (rank >= by) & same, at, -1)


def at_places(x, places):
    """Rows at places of their own sequence; zero where there is none."""
    return keep(take_tokens(x, places.clamp(min=0)), places)


def conv(x, w, segments=None):
    """y[i] = Σ_m w[m] ⊙ x[i - m], a weight of each channel."""
    return sum(w[m] * shift(x, m, segments=segments) for m in range(len(w)))


def shift(x, by, places=None, segments=None):
    """The row of the token `by` before; zero before the start, and before a document's."""
    if places is None and segments is None:
        return F.pad(x, (0, 0) * (x.dim() - 2) + (by, 0))[:, : x.shape[1]]
    if segments is None:
        segments = torch.zeros_like(places)
    if places is not None:
        segments = torch.where(places >= 0, segments, -1)
    return at_places(x, before(segments, by))


def running(x, segments):
    """Σ_{j≤i} x[j] over tokens of the same document."""
    same = (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, :, None]
    return torch.einsum("bij,bj...->bi...", same.tril().to(x.dtype), x)


def running_block(x, positions, block, segments=None):
    """Σ_{j≤i} x[j] over tokens of the same document and the same block of positions."""
    number = torch.div(positions, block, rounding_mode="floor")
    same = number[:, :, None] == number[:, None, :]
    if segments is not None:
        same = same & (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, :, None]
    return torch.einsum("bij,bj...->bi...", same.tril().to(x.dtype), x)


class document_marks:
    """Which tokens take part, and which of those begin a document."""

    def __init__(self, segments):
        self.taking = segments >= 0
        self.begins = self.taking & (before(segments, 1) < 0)


def choose(condition, a, b):
    """Rows of `a` where it holds, else of `b`."""
    return torch.where(condition.reshape((-1,) + (1,) * (b.dim() - 1)), a, b)


def cross_entropy(logits, targets):
    """The loss of each token; 0 where its target is negative."""
    nll = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction="none")
    return nll.reshape(targets.shape)


def smaller(a, b):
    """The smaller of two, either of which may be a number."""
    return torch.minimum(*as_tensors(a, b))


def larger(a, b):
    """The larger of two, either of which may be a number."""
    return torch.maximum(*as_tensors(a, b))


def as_tensors(a, b):
    like = a if torch.is_tensor(a) else b
    make = lambda x: x if torch.is_tensor(x) else torch.tensor(x, device=like.device)
    a, b = make(a), make(b)
    both = torch.promote_types(a.dtype, b.dtype)
    return a.to(both), b.to(both)


def softplus(x):
    """ln(1 + e^x)"""
    return torch.logaddexp(x, torch.zeros_like(x))
