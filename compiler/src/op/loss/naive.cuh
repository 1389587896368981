// functions
// The logit of a row and a class.
DEVICE float capped(float z) { return CAPPED ? SOFTCAP * tanhf(z / SOFTCAP) : z; }
// pass cross_entropy: a row
const Float0 *row = logits + at * VOCAB;
int target = targets[at];
if (target >= 0 && !below(target, VOCAB, status, launch)) return;
float most = -infinity(), sum = 0.0f;
for (i64 c = 0; c < VOCAB; ++c) most = fmaxf(most, value(row[c]));
for (i64 c = 0; c < VOCAB; ++c) sum += expf(value(row[c]) - most);
lse[at] = most + logf(sum);
nll[at] = target < 0 ? 0.0f : lse[at] - value(row[target]);
// pass cross_entropy_grad: an element of dlogits
i64 row = at / VOCAB;
int target = targets[row];
if (target >= 0 && !below(target, VOCAB, status, launch)) return;
float p = expf(value(logits[at]) - lse[row]);
put(dlogits + at, target < 0 ? 0.0f : d[row] * p - (target == at % VOCAB ? d[row] : 0.0f));
// pass logits: a logit of a row and a class
float z = 0.0f;
for (i64 i = 0; i < WIDTH; ++i) z = fmaf(value(x[at / VOCAB * WIDTH + i]), number(w, at % VOCAB * WIDTH + i), z);
logits[at] = capped(z);
// pass head_loss: a row
const float *row = logits + at * VOCAB;
int target = targets[at];
if (target >= 0 && !below(target, VOCAB, status, launch)) return;
float most = -infinity(), sum = 0.0f;
for (i64 c = 0; c < VOCAB; ++c) most = fmaxf(most, row[c]);
for (i64 c = 0; c < VOCAB; ++c) sum += expf(row[c] - most);
lse[at] = most + logf(sum);
nll[at] = target < 0 ? 0.0f : lse[at] - row[target];
// pass cotangents: the cotangent of a logit before its cap, in its place
i64 row = at / VOCAB;
int target = targets[row];
if (target >= 0 && !below(target, VOCAB, status, launch)) return;
float t = CAPPED ? logits[at] / SOFTCAP : 0.0f;
float g = d[row] * expf(logits[at] - lse[row]) - (target == at % VOCAB ? d[row] : 0.0f);
logits[at] = target < 0 ? 0.0f : g * (1.0f - t * t);
// pass rows: an element of dx
float sum = 0.0f;
for (i64 c = 0; c < VOCAB; ++c) sum = fmaf(logits[at / WIDTH * VOCAB + c], value(w[c * WIDTH + at % WIDTH]), sum);
dx[at] = sum;
// pass classes: an element of dw
float sum = 0.0f;
for (i64 r = 0; r < ROWS; ++r) sum = fmaf(logits[r * VOCAB + at / WIDTH], value(x[r * WIDTH + at % WIDTH]), sum);
dw[at] = ACCUMULATE ? dw[at] + sum : sum;
