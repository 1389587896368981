class DreamcForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = DreamcConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_cache_class = True
    _no_split_modules = @NO_SPLIT@

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([
@LAYERS@
        ])
        self.body = nn.ModuleList([  #? stated
@STATEMENTS@  #? stated
        ])  #? stated
        self.loops = nn.ModuleDict({  #? loops
@LOOPS@  #? loops
        })  #? loops
        self.output = nn.ModuleDict({"lanes": LaneHead(config)})  #? mhc
        self.output = nn.ModuleDict({"read": Read(config.hidden_size)})  #? attend
        self.lanes = nn.ModuleDict({"embed": Matrix(config.lanes, config.hidden_size)})  #? lane_embed
        self.norm = Norm(config.hidden_size)  #? final_norm
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)  #? !tie&!head_bias
        self.head = nn.Linear(config.hidden_size, config.vocab_size)  #? !tie&head_bias
        self.head = nn.ParameterDict({"bias": torch.zeros(config.vocab_size)})  #? tie&head_bias
        self.norms = nn.Module()  #? norm_of
        for name in @GAINS@:  #? norm_of
            self.norms._modules[name] = Norm(config.hidden_size)  #? norm_of
        # Layers in the order in which they are applied, by number; one number stands for one set of weights.
        # `~k` is the statement of number `k`.  #? stated
        # `"k"` begins a pass of loop `k`.  #? turns
        # `"out"` is after the last pass.  #? out
        self.order = @ORDER@
        applied = [i for i in self.order if not isinstance(i, str) and i >= 0]  #? turns
        config.num_hidden_layers = sum(self.layers[i].slots for i in applied)  #? turns
        config.num_hidden_layers = sum(self.layers[i].slots for i in self.order if i >= 0)  #? !turns
        self.post_init()

    def _init_weights(self, module):
        """Weights come from the file; what is made without one begins as small numbers, and gains as they are."""
        for weight in module.parameters(recurse=False):
            if weight.dim() > 1 and not getattr(weight, "_is_hf_initialized", False):
                weight.data.normal_(0.0, 0.02)

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, labels=None, logits_to_keep=0,
                **kwargs):
        """Logits of every token, or of the last `logits_to_keep`; `attention_mask` is 0 for padding on the left."""
        if use_cache is None:
            use_cache = past_key_values is not None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        b, t = input_ids.shape
        s = t + (past_key_values.get_seq_length() if past_key_values is not None else 0)
        tokens = torch.ones(b, s, dtype=torch.bool, device=input_ids.device)
        if attention_mask is not None:
            tokens = tokens & attention_mask[:, :s].bool()
        index = torch.arange(s, device=input_ids.device)
        back = index[s - t :, None] - index
        at = Pass(
            positions=(tokens.cumsum(-1) - 1).clamp(min=0)[:, s - t :],  #? sequence|noise
            visible=(back >= 0) & tokens[:, None],  #? sequence
            back=back,  #? window
            cache=past_key_values,
            depths=sum(i >= 0 for i in self.order),  #? depth_position&!turns
            depths=sum(not isinstance(i, str) and i >= 0 for i in self.order),  #? depth_position&turns
            here=tokens[:, s - t :],  #? skip
            part=tokens[:, s - t :],  #? skip
            keys=tokens[:, s - t :],  #? skip
            norms={"final": self.norm, **self.norms._modules},  #? norm_of&final_norm
            norms=self.norms._modules,  #? norm_of&!final_norm
        )
        x = self.embed(input_ids)
        x = x * @EMBED_SCALE@  #? embed_scale
        x = x[..., None, :].expand(-1, -1, self.config.lanes, -1)  #? lanes
        x = x + self.lanes["embed"].weight  #? lane_embed
        x = Sources(x)  #? attend
        at.history.append(x)  #? history
        for i in self.order:
            if i == "out":  #? out
                at.gone = None  #? leaving
                at.shares = False  #? kv_first
                if at.start is not None:  #? depth_choice
                    x, at.start = at.start + at.gate * x, None  #? depth_choice
                continue  #? out
            if i in self.loops:  #? turns
                x = self.loops[i](x, at)  #? turns&!leaving
                x = at.stay(x, self.loops[i](x, at))  #? leaving
                continue  #? turns
            if i < 0:  #? stated
                x = self.body[~i](x, at)  #? stated&!leaving
                x = at.stay(x, self.body[~i](x, at))  #? stated&leaving
                continue  #? stated
            x = at.stay(x, self.layers[i](x, at))  #? leaving
            x = self.layers[i](x, at)  #? !leaving
            at.depth += 1  #? depth_position
            at.history.append(x)  #? history
        x = x.sum(-2)  #? lanes&!mhc
        x = self.output["lanes"](x)  #? mhc
        x = self.output["read"](x)  #? attend
        x = self.norm(x)  #? final_norm
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = self.head(x)  #? !tie
        logits = F.linear(x, self.embed.weight)  #? tie&!head_bias
        logits = F.linear(x, self.embed.weight, self.head["bias"])  #? tie&head_bias
        logits = @LOGIT_SCALE@ * logits  #? logit_scale
        logits = @LOGIT_SOFTCAP@ * torch.tanh(logits / @LOGIT_SOFTCAP@)  #? logit_softcap
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
