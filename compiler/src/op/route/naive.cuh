// pass choices: a choice, the candidate whose rank is its number
const float *scores = z + at / K * EXPERTS;
for (i64 e = 0; e < EXPERTS; ++e) {
    i64 rank = 0;
    for (i64 other = 0; other < EXPERTS; ++other) rank += before(scores[other], other, scores[e], e);
    if (rank == at % K) chosen[at] = (int)e;
}
