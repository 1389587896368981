@dataclass
class Pass:
    """What the layers share while some tokens run through the model: `b` texts of `t` new tokens, `s` with those before."""

    positions: torch.Tensor  # [b, t], the place of each new token in its text  #? sequence|noise
    visible: torch.Tensor  # [b, t, s], which tokens each new one may look at  #? sequence
    back: torch.Tensor  # [t, s], how far each token is behind each new one  #? window
    cache: Cache | None
    depths: int  # applications of layers in all  #? depth_position
    depth: int = 0  # the application that is computed  #? depth_position
    slot: int = 0  # the next place of the cache
    saved: dict = field(default_factory=dict)  # streams by the names they were saved under  #? save
    earlier: dict = field(default_factory=dict)  # keys and values of earlier applications  #? depth
    here: torch.Tensor | None = None  # [b, t], the tokens that there are  #? skip
    part: torch.Tensor | None = None  # [b, t], the tokens that take part  #? skip
    keys: torch.Tensor | None = None  # [b, t], the new tokens that are keys  #? skip
    seen: torch.Tensor | None = None  # [b, s], the tokens that are keys; None: all  #? skip

    def update(self, k, v):
        """Keys and values `[b, heads, s, d]` of all tokens, from those of the new ones."""
        slot, self.slot = self.slot, self.slot + 1
        return (k, v) if self.cache is None else self.cache.update(k, v, slot)

    def remember(self, x):  #? remember
        """Rows `[b, s, n]` of all tokens, from those of the new ones."""  #? remember
        return self.update(x[:, None], x[:, None])[0][:, 0]  #? remember
