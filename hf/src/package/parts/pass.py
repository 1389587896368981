@dataclass
class Pass:
    """What the layers share while some tokens run through the model: `b` texts of `t` new tokens, `s` with those before."""

    positions: torch.Tensor  # [b, t], the place of each new token in its text  #? sequence|noise
    visible: torch.Tensor  # [b, t, s], which tokens each new one may look at  #? sequence
    back: torch.Tensor  # [t, s], how far each token is before each new one  #? window
    cache: Cache | None
    depths: int  # applications of layers in all  #? depth_position
    depth: int = 0  # the application that is computed  #? depth_position
    slot: int = 0  # the next place of the cache
    norms: dict = field(default_factory=dict)  # norms by the names of their gains  #? norm_of
    saved: dict = field(default_factory=dict)  # streams by the names they were saved under  #? save
    applied: dict = field(default_factory=dict)  # how often what stands between lanes was applied  #? lanes
    earlier: dict = field(default_factory=dict)  # keys and values of earlier applications  #? depth
    first_values: dict = field(default_factory=dict)  # values of the first application of a component  #? value_residual
    same_token: dict = field(default_factory=dict)  # keys and values that a component made of the new tokens  #? depth_keys
    depth_stream: list = field(default_factory=list)  # keys before any norm and values that components left of the new tokens  #? depth_stream
    made: dict = field(default_factory=dict)  # keys and values of all tokens that a component made last  #? kv_from
    history: list = field(default_factory=list)  # the stream after every layer so far, the embedding first  #? history
    loop: nn.Module | None = None  # the loop that is run  #? turns
    turn: int = 0  # the pass of it  #? turns
    shares: bool = False  # whether passes use the keys and values of the first  #? kv_first
    replaces: bool = False  # whether they use their own where tokens take part  #? kv_replaced
    place: int = 0  # the next of these in a pass  #? kv_first
    first_pass: list = field(default_factory=list)  # keys and values of all tokens in the first pass, and which are keys  #? kv_first
    last_turn: torch.Tensor | None = None  # [b, t], the last pass that each new token makes  #? depth_choice
    gate: torch.Tensor | None = None  # [b, t, 1], the share of that choice  #? depth_choice
    start: torch.Tensor | None = None  # the stream where tokens chose  #? depth_choice
    rest: torch.Tensor | None = None  # [b, t], the share of each new token that is still in it  #? leaving
    gone: torch.Tensor | None = None  # [b, t], the new tokens that left it  #? leaving
    last_pass: list = field(default_factory=list)  # keys and values of the new tokens in the pass before  #? leaving
    this_pass: list = field(default_factory=list)  # the same of this one  #? leaving
    members: dict = field(default_factory=dict)  # the new tokens that a nested skip processed last  #? nested
    here: torch.Tensor | None = None  # [b, t], the tokens that there are  #? skip
    part: torch.Tensor | None = None  # [b, t], the tokens that take part  #? skip
    keys: torch.Tensor | None = None  # [b, t], the new tokens that are keys  #? skip
    seen: torch.Tensor | None = None  # [b, s], the tokens that are keys; None: all  #? skip

    def update(self, k, v):
        """Keys and values `[b, heads, s, d]` of all tokens, from those of the new ones."""
        if self.gone is not None:  #? leaving
            if self.last_pass:  #? leaving
                (before, values), gone = self.last_pass[len(self.this_pass)], self.gone[:, None, :, None]  #? leaving
                k, v = torch.where(gone, before, k), torch.where(gone, values, v)  #? leaving
            self.this_pass.append((k, v))  #? leaving
        slot, self.slot = self.slot, self.slot + 1
        return (k, v) if self.cache is None else self.cache.update(k, v, slot)

    def shared(self, k, v):  #? kv_first
        """Keys and values of all tokens, and which of them are keys: those of the first pass where passes share them."""  #? kv_first
        if not self.shares:  #? kv_first
            return *self.update(k, v), self.seen  #? kv_first&skip
            return *self.update(k, v), None  #? kv_first&!skip
        if self.replaces:  #? kv_replaced
            if self.turn == 0:  #? kv_replaced
                self.first_pass.append((k, v, self.seen))  #? kv_replaced
            (first, values, seen), self.place = self.first_pass[self.place], self.place + 1  #? kv_replaced
            own = self.keys[:, None, :, None]  #? kv_replaced
            return *self.update(torch.where(own, k, first), torch.where(own, v, values)), seen  #? kv_replaced
        if self.turn == 0:  #? kv_first
            self.first_pass.append((*self.update(k, v), self.seen))  #? kv_first&skip
            self.first_pass.append((*self.update(k, v), None))  #? kv_first&!skip
        self.place += 1  #? kv_first
        return self.first_pass[self.place - 1]  #? kv_first
#? kv_first
    def stay(self, before, x):  #? leaving
        """The stream after a step, and of tokens that left what it was before."""  #? leaving
        return x if self.gone is None else torch.where(self.gone[..., None], before, x)  #? leaving
#? leaving&remember
    def remember(self, x):  #? remember
        """Rows `[b, s, n]` of all tokens, from those of the new ones."""  #? remember
        return self.update(x[:, None], x[:, None])[0][:, 0]  #? remember
