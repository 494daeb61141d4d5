/* Activations (args.h). */

float gelu_tanh(float x)
{
    return 0.5 * x * (1 + tanh_of(0.7978845608 * (x + 0.044715 * x * x * x)));
}

/* erf, to 1.2e-7 of 1 */
float erf_of(float x)
{
    float t = 1 / (1 + 0.5 * abs(x));
    float s = t * (0.37409196 + t * (0.09678418 + t * (-0.18628806 + t * (0.27886807 +
              t * (-1.13520398 + t * (1.48851587 + t * (-0.82215223 + t * 0.17087277)))))));
    float v = 1 - t * exp(-x * x - 1.26551223 + t * (1.00002368 + s));
    return x >= 0 ? v : -v;
}

float gelu(float x)
{
    return 0.5 * x * (1 + erf_of(x * 0.7071067812));
}

float expm1_of(float x)
{
    return abs(x) < 0.03 ? x * (1 + x * (0.5 + x * (1.0 / 6 + x / 24))) : exp(x) - 1;
}

float activation_of(float g, float u, uint act, float alpha, float limit, float beta)
{
    switch (act) {
    case KERNEL_ACT_SILU:
        return g * sigmoid(g) * u;
    case KERNEL_ACT_GELU_TANH:
        return gelu_tanh(g) * u;
    case KERNEL_ACT_GELU:
        return gelu(g) * u;
    case KERNEL_ACT_SWIGLU_CLAMP:
        g = min(g, limit);
        return g * sigmoid(alpha * g) * (clamp(u, -limit, limit) + 1);
    case KERNEL_ACT_SILU_CLAMP:
        g = min(g, limit);
        return g * sigmoid(g) * clamp(u, -limit, limit);
    case KERNEL_ACT_SILU_LIMIT:
        return min(g * sigmoid(g), limit) * clamp(u, -limit, limit);
    case KERNEL_ACT_RELU2:
        return g > 0 ? g * g * u : 0;
    case KERNEL_ACT_PLAIN_RELU2:
        return g > 0 ? g * g : 0;
    case KERNEL_ACT_PLAIN_XIELU:
        return beta * g + (g > 0 ? alpha * g * g : limit * (expm1_of(g) - g));
    case KERNEL_ACT_PLAIN_GELU:
        return gelu(g);
    case KERNEL_ACT_PLAIN_GELU_TANH:
        return gelu_tanh(g);
    case KERNEL_ACT_PLAIN_QUICK_GELU:
        return g * sigmoid(1.702 * g);
    default:
        return g;
    }
}
