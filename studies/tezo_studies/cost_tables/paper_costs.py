"""The numbers of the paper's appendix tables of memory and time."""

MODELS = ("OPT 125M", "OPT 1.3B", "OPT 2.7B", "OPT 6.7B", "OPT 13B", "OPT 30B", "LLaMA 7B", "LLaMA 13B", "LLaMA 30B")

GIGABYTES: dict[str, tuple[float | None, ...]] = {
    "zero-shot": (0.36, 2.90, 5.44, 12.73, 24.39, 56.46, 12.92, 24.89, 61.86),
    "mezo": (0.57, 3.48, 6.40, 14.40, 26.43, 60.31, 13.91, 26.12, 63.77),
    "subzo": (0.54, 3.28, 5.92, 14.91, 26.97, 61.18, 14.28, 26.67, 64.45),
    "lozo": (0.52, 3.31, 5.95, 13.66, 25.50, 57.93, 13.44, 25.77, 62.38),
    "tezo": (0.54, 3.28, 5.92, 13.68, 25.52, 57.95, 13.47, 25.79, 62.40),
    "mezo-m": (0.89, 6.31, 11.77, 27.19, 51.32, None, 26.85, 51.31, None),
    "lozo-m": (0.53, 3.32, 5.97, 13.68, 25.53, 57.99, 13.47, 25.80, 62.44),
    "tezo-m": (0.55, 3.29, 5.93, 13.69, 25.52, 57.96, 13.48, 25.79, 62.40),
    "mezo-adam": (1.19, 9.15, 16.90, 39.98, 75.27, None, 39.50, 75.69, None),
    "tezo-adam": (0.57, 3.48, 6.16, 14.07, 26.01, 58.64, 13.71, 26.16, 62.80),
}
"""The paper's maximum reserved memory on an H100, RTE, in GiB; columns as `MODELS`. None: above 80."""

ADAPTERS: dict[str, tuple[float, float]] = {
    "ft": (105.24, 238.26),
    "ft, LoRA": (37.96, 73.19),
    "ft, prefix": (38.23, 73.13),
    "mezo, LoRA": (13.04, 24.82),
    "mezo, prefix": (13.06, 24.81),
}
"""The paper's memory in GiB for OPT 6.7B and 13B."""

MILLISECONDS: dict[str, tuple[float | None, ...]] = {
    "mezo": (33, 69, 111, 212, 388, 871, 212, 372, 942),
    "subzo": (39, 75, 121, 211, 373, 939, 218, 385, 988),
    "lozo": (34, 71, 109, 191, 341, 745, 195, 350, 832),
    "tezo": (36, 67, 106, 178, 316, 680, 186, 325, 775),
    "mezo-m": (32, 76, 123, 236, 437, None, 236, 422, None),
    "lozo-m": (40, 78, 104, 181, 312, 677, 180, 316, 759),
    "tezo-m": (37, 70, 100, 172, 303, 653, 176, 308, 738),
    "mezo-adam": (39, 104, 173, 348, 642, None, 342, 624, None),
    "tezo-adam": (54, 92, 134, 224, 394, 841, 227, 397, 937),
}
"""The paper's wall-clock time of an iteration in milliseconds on an H100, RTE; columns as `MODELS`."""
