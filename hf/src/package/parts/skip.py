class Skip(nn.Module):
    """Only some tokens are processed by the part inside; the others keep their stream."""

    def __init__(
        self, config, rule, capacity=1.0, predictor=0, norm_only=False, whole=False, all_keys=False, merge=False,
        passes=0,  #? pass_router
        shares=None,  #? pass_shares
        nested=False,  #? nested
        sigmoid=False,  #? sigmoid_gate
        tanh=False,  #? tanh_gate
        gate_scale=1.0,  #? gate_scale
        of_stream=False,  #? whole_gate
        temperature=1.0,  #? skip_temperature
        network=0,  #? skip_network
    ):
        super().__init__()
        h = config.hidden_size
        self.rule, self.capacity, self.whole, self.all_keys, self.merge = rule, capacity, whole, all_keys, merge
        each = {"passes": passes} if passes else {}  #? pass_router
        each = {}  #? score&!pass_router
        self.shares = shares  # of each pass of the loop around  #? pass_shares
        self.nested = nested  # a pass chooses among the tokens of the one before  #? nested
        self.sigmoid = sigmoid  #? sigmoid_gate
        self.tanh = tanh  #? tanh_gate
        self.gate_scale = gate_scale  #? gate_scale
        self.of_stream = of_stream  # the factor is on the stream after the part  #? whole_gate
        if rule == "depth_choice":  # the loop has chosen  #? depth_choice&score
            return  #? depth_choice&score
        self.temperature = temperature  #? skip_temperature
        if network:  #? skip_network
            self.network = Network(network, h, **each)  #? skip_network
        elif norm_only:  #? skip_network&norm_only
            self.router = NormScore(**each)  #? skip_network&norm_only
        else:  #? skip_network
            self.router = Score(h, **each)  #? skip_network
        self.router = NormScore(**each) if norm_only else Score(h, **each)  #? norm_only&!skip_network
        self.router = Score(h, **each)  #? score&!norm_only&!skip_network
        if predictor:  #? predictor
            self.predictor = Predictor(predictor, h, **each)  #? predictor

    def choose(self, x, at):
        """Which tokens take part, and the factor on their update."""
        if self.rule == "depth_choice":  #? depth_choice
            part = at.part & (at.last_turn >= at.turn)  #? depth_choice
            return part, part.to(x.dtype)  #? depth_choice
        read = x  #? score
        read = x / self.temperature  #? skip_temperature
        r = self.network(read, at) if hasattr(self, "network") else self.router(read, at)  #? skip_network
        r = self.router(read, at)  #? score&!skip_network
        if self.rule == "threshold":  #? threshold
            if self.whole:  #? threshold&whole
                r = (r * at.here).sum(-1, keepdim=True) / at.here.sum(-1, keepdim=True)  #? threshold&whole
            part = at.part & (r >= 0)  #? threshold
            return part, part.to(x.dtype)  #? threshold
        gate = r  #? score
        if self.sigmoid:  #? sigmoid_gate
            gate = r.sigmoid()  #? sigmoid_gate
        if self.tanh:  #? tanh_gate
            gate = r.tanh()  #? tanh_gate
        gate = self.gate_scale * gate  #? gate_scale
        part = self.part(x, r, at)  #? score
        if self.nested:  #? nested
            at.members[self] = part  #? nested
        return part, gate.to(x.dtype)  #? score
#? score
    def part(self, x, r, at):  #? score
        """The tokens that take part, of those whose scores rank them."""  #? score
        among = at.part  #? bce|predictor|all_tokens
        capacity = self.capacity  #? topk
        if self.shares is not None:  #? pass_shares
            capacity = self.shares[at.turn]  #? pass_shares
            if capacity >= 1.0:  #? pass_shares
                return at.part  #? pass_shares
        if self.nested and at.turn:  #? nested&bce
            among = at.part & at.members[self]  #? nested&bce
        if self.nested and at.turn:  #? nested&predictor
            among = at.part & at.members[self]  #? nested&predictor
        if self.rule == "bce":  #? bce
            return among & (r > 0)  #? bce
        if self.rule == "predictor":  #? predictor
            return among & (self.predictor(x, at) > 0)  #? predictor
        if self.rule == "all":  #? all_tokens
            return among  #? all_tokens
        # The best of each text: this looks ahead, so that nothing can be cached.  #? topk
        among = at.here  #? topk&!nested
        among = at.here & at.members[self] if self.nested and at.turn else at.here  #? topk&nested
        k = (capacity * at.here.sum(-1) + 1e-9).floor().clamp(min=1)  #? topk
        order = r.masked_fill(~among, -math.inf).sort(dim=-1, descending=True, stable=True).indices  #? topk
        return (order.argsort(-1) < k[:, None]) & among  #? topk

    def forward(self, x, at, inside):
        around = at.here, at.part, at.keys, at.seen
        part, gate = self.choose(x, at)
        if self.rule == "topk":  #? topk
            if at.cache is not None:  #? topk
                raise ValueError("this model's router looks ahead: it scores texts and cannot write")  #? topk
            at.here = part  #? topk
        if self.whole and at.cache is not None:  #? threshold&whole
            raise ValueError("this model's router decides by whole texts: it scores texts and cannot write")  #? threshold&whole
        at.part = part
        if not self.all_keys:
            at.keys, at.seen = part, at.remember(part[..., None].to(x.dtype))[..., 0] > 0
        y = inside(self.merged(x, part, around[1], at) if self.merge else x, at)  #? merge
        y = inside(x, at)  #? !merge
        if self.of_stream:  #? whole_gate
            y = x + y  #? whole_gate
        at.here, at.part, at.keys, at.seen = around
        y = torch.where(part[..., None], y * gate[..., None], 0.0)
        if self.merge:  #? merge
            y = self.shared(y, part, at)  #? merge
        return y

    def slots(self):
        """Places of the cache that it takes itself."""
        return (0 if self.all_keys else 1) + (4 if self.merge else 0)

    def merged(self, x, part, around, at):  #? merge
        """Each token as the mean of itself and those that were skipped since the one before it that takes part."""  #? merge
        t = x.shape[1]  #? merge
        whole = [at.remember(each) for each in (x, part[..., None].to(x.dtype), around[..., None].to(x.dtype))]  #? merge
        streams, parts, there = whole[0], whole[1][..., 0], whole[2][..., 0] > 0  #? merge
        group = parts.cumsum(-1) - parts  #? merge
        index = torch.arange(group.shape[1], device=x.device)  #? merge
        same = (group[:, -t:, None] == group[:, None]) & (index[-t:, None] >= index) & there[:, None]  #? merge
        same = same.to(x.dtype)  #? merge
        return (same @ streams) / same.sum(-1, keepdim=True).clamp(min=1)  #? merge
#? merge
    def shared(self, y, part, at):  #? merge
        """The update of the last token that takes part, for those after it."""  #? merge
        t = y.shape[1]  #? merge
        whole = at.remember(torch.cat([y, part[..., None].to(y.dtype)], -1))  #? merge
        updates, parts = whole[..., :-1], whole[..., -1] > 0  #? merge
        index = torch.arange(parts.shape[1], device=y.device)  #? merge
        last = torch.where(parts, index, -1).cummax(-1).values[:, -t:]  #? merge
        found = updates.gather(1, last.clamp(min=0)[..., None].expand(-1, -1, updates.shape[-1]))  #? merge
        return torch.where(((last >= 0) & at.part)[..., None], found, 0.0)  #? merge
