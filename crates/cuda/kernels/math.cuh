// The elementary functions of backend/src/math.rs, with equal bits. common.cuh goes before this.

DEVICE float exp_(float x) {
    float y = larger(smaller(x, 88.0f), -87.0f);
    float n = rintf(y * 1.44269504088896340736f);
    float r = fmaf(n, -0.6933594f, y);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = 1.0f / 5040.0f;
    p = fmaf(p, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    float power = __uint_as_float((u32) ((int) n + 127) << 23);
    return x < -87.0f ? 0.0f : p * power;
}
DEVICE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(0.0f - x)); }
DEVICE float silu_(float x) { return x * sigmoid_(x); }
DEVICE float tanh_(float x) { return 1.0f - 2.0f / (exp_(x + x) + 1.0f); }
DEVICE float gelu_(float x) {
    float u2 = 1.595769f * fmaf(x * x * x, 0.044715f, x);
    return x * sigmoid_(u2);
}
// GELU by the error function.
DEVICE float gelu_erf_(float x) {
    float size = larger(x, 0.0f - x);
    float t = 1.0f / fmaf(size, 0.2316419f, 1.0f);
    float p = 1.0614054f;
    p = fmaf(p, t, -1.4531521f);
    p = fmaf(p, t, 1.4214138f);
    p = fmaf(p, t, -0.28449672f);
    p = fmaf(p, t, 0.2548296f);
    float below = 0.5f * (p * t) * exp_(-0.5f * x * x);
    return x * (x < 0.0f ? below : 1.0f - below);
}
DEVICE float artanh_double(float s) {
    float s2 = s * s;
    float p = 2.0f / 11.0f;
    p = fmaf(p, s2, 2.0f / 9.0f);
    p = fmaf(p, s2, 2.0f / 7.0f);
    p = fmaf(p, s2, 2.0f / 5.0f);
    p = fmaf(p, s2, 2.0f / 3.0f);
    return fmaf(p * s2, s, 2.0f * s);
}
DEVICE float ln_(float x) {
    u32 bits = __float_as_uint(x);
    int e = (int) (bits - 0x3f3504f3u) >> 23;
    float m = __uint_as_float(bits - ((u32) e << 23));
    float tail = artanh_double((m - 1.0f) / (m + 1.0f));
    return fmaf((float) e, 0.6933594f, fmaf((float) e, -2.1219444e-4f, tail));
}
DEVICE float softplus_(float x) {
    float y = exp_(0.0f - fabsf(x));
    float tail = y < 0.4f ? artanh_double(y / (2.0f + y)) : ln_(1.0f + y);
    return (x > 0.0f ? x : 0.0f) + tail;
}
DEVICE void sin_cos(float x, float &sin, float &cos) {
    float n = rintf(x * 0.63661977236758134308f);
    float r = fmaf(n, -1.5707964f, x);
    r = fmaf(n, 4.371139e-8f, r);
    float r2 = r * r;
    float s = 1.0f / 362880.0f;
    s = fmaf(s, r2, -1.0f / 5040.0f);
    s = fmaf(s, r2, 1.0f / 120.0f);
    s = fmaf(s, r2, -1.0f / 6.0f);
    s = fmaf(s * r2, r, r);
    float k = -1.0f / 3628800.0f;
    k = fmaf(k, r2, 1.0f / 40320.0f);
    k = fmaf(k, r2, -1.0f / 720.0f);
    k = fmaf(k, r2, 1.0f / 24.0f);
    k = fmaf(k, r2, -0.5f);
    k = fmaf(k, r2, 1.0f);
    float q = n - 4.0f * rintf(n * 0.25f - 0.375f);
    q = q < 0.0f ? q + 4.0f : q;
    q = q < 3.5f ? q : q - 4.0f;
    float odd = q < 1.5f ? (q < 0.5f ? s : k) : (q < 2.5f ? 0.0f - s : 0.0f - k);
    float even = q < 1.5f ? (q < 0.5f ? k : 0.0f - s) : (q < 2.5f ? 0.0f - k : s);
    sin = odd;
    cos = even;
}
// Function `f`: 0 SiLU, 1 GELU by tanh, 2 sigmoid, 3 GELU by the error function, as in src/elementwise.rs.
DEVICE float activate(int f, float x) {
    return f == 0 ? silu_(x) : f == 1 ? gelu_(x) : f == 2 ? sigmoid_(x) : gelu_erf_(x);
}
