"""The methods of the field as points of one space: the tables of docs/methods.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mismatch_plugin.report.table import NOTHING, Table


class Method(NamedTuple):
    """One method. formula: of a token, with ρ = π_train/π_rollout, r = π_θ/anchor. flags: what gives it here."""

    name: str
    source: str
    formula: str
    flags: str
    elsewhere: str
    """What others call it, or the host's own switch that gives it."""


# fmt: off
_PRIME = "--rs-criterion token:tv:0.2@away --mismatch-denominator original --mismatch-rollout-kl-coef 2e-3"

METHODS = (
    Method("PPO", "Schulman et al. 2017", "−min(r A, clip(r) A)", "", "the default of every host"),
    Method("Dual clip", "Ye et al. 2020", "at most −c A where A < 0", "--mismatch-dual-clip 3",
        "slime --eps-clip-c; verl clip_ratio_c"),
    Method("Decoupled PPO, TIS", "Hilton et al. 2021; Yao et al. 2025", "min(ρ_t, hi) · PPO",
        "--mismatch-preset token_is", "slime --use-tis; verl rollout_is: token"),
    Method("Sequence weights, MIS", "Liu & Li 2025", "Π ρ, or rejected outside [lo, hi]",
        "--use-tis --tis-level sequence --tis-mode mask", "verl rollout_is: sequence; slime mis.yaml"),
    Method("Geometric rejection", "rollout-correction guide", "sequences with (Π ρ)^(1/n) outside are dropped",
        "--mismatch-preset geo_rs", "verl seq_mean_k1"),
    Method("IcePop", "arXiv 2510.18855", "ρ_t inside [lo, hi], else 0; divided by all tokens",
        "--mismatch-preset token_icepop", "slime icepop_function; verl \"0.5_5\""),
    Method("Self-normalised weights", "rollout-correction guide, 3.6", "w / mean w of the step",
        "--use-tis --tis-batch-normalize", "verl rollout_is_batch_normalize"),
    Method("REINFORCE + IS", "Williams 1992; Liu & Li 2025", "−sg(w) A log π_θ", "--mismatch-preset pg_is",
        "verl bypass_mode, loss_type reinforce"),
    Method("Per-decision weights", "Precup et al. 2000", "min(Π_{k≤t} ρ_k, 5^√t) · PPO",
        "--mismatch-preset prefix_is", NOTHING),
    Method("Turn weights", NOTHING, "Π of the turn's own ρ, truncated (Precup's would run over all turns so far)",
        "--use-tis --tis-level turn", NOTHING),
    Method("KPop", "KPop 2026", "PPO, kept where both binary KLs are ≤ 0.1; no weight", "--mismatch-preset kpop",
        "AReaL's metric=binary_kl has these masks and another loss: the next row"),
    Method("KPop in AReaL", "AReaL", "ρ_t · PPO where both binary KLs are ≤ 0.1, else 0; divided by all tokens",
        "--mismatch-preset kpop --use-tis --tis-upper-bound inf --mismatch-denominator original",
        "AReaL metric=binary_kl"),
    Method("TRM", "arXiv 2512.23075", "sequences dropped by max k2 and mean k3",
        "--rs-criterion sequence_max:k2:0.5 --rs-criterion sequence_mean:k3:0.01", NOTHING),
    Method("M2PO", "arXiv 2510.01161", "PPO, tokens of the largest l² dropped until the mean l² of the rest is ≤ 0.04",
        "--mismatch-preset m2po", "AReaL m2_threshold, which sorts each micro-batch; here by the step before"),
    Method("At most a share", NOTHING,
        "responses of mean k3 above 0.01 dropped, but at most a quarter of all: the largest",
        "--rs-criterion sequence_mean:k3:0.01:share=0.25", NOTHING),
    Method("DPPO-TV", "arXiv 2602.04879",
        "−sg(min(ρ_t, c)) A log π_θ, kept where |π_θ − π_rollout| ≤ δ or the step leads back",
        "--mismatch-preset dppo_tv", "verl loss_mode dppo_tv"),
    Method("DPPO-KL", "arXiv 2602.04879", "the same by the binary KL", "--mismatch-preset dppo_kl",
        "verl loss_mode dppo_kl"),
    Method("OPSM", "DeepSeek-V3.2, arXiv 2512.02556",
        "sequences dropped where A < 0 and mean(log π_rollout − log π_θ) > δ",
        "--rs-criterion sequence_mean:k1:0.905:inf@negative --rs-policy current --mismatch-denominator original",
        "slime --use-opsm --opsm-delta; TRL off_policy_mask_threshold"),
    Method("GSPO", "arXiv 2507.18071", "PPO-clip on s_t = exp(mean of the sequence's log r)",
        "--mismatch-objective gspo --mismatch-aggregation seq-mean-token-mean",
        "slime, miles --advantage-estimator gspo; verl loss_mode gspo; NeMo-RL sequence_level_importance_ratios"),
    Method("CISPO", "arXiv 2506.13585", "−sg(min(r, 1 + ε)) A log π_θ", "--mismatch-objective cispo",
        "slime --advantage-estimator cispo; verl loss_mode cispo; NeMo-RL use_cispo"),
    Method("SAPO", "arXiv 2511.20347", "−A (4/τ) sigmoid(τ (r − 1)), τ by the sign of A", "--mismatch-preset sapo",
        "verl loss_mode sapo; TRL loss_type sapo"),
    Method("GMPO", "arXiv 2507.20673",
        "−A exp(mean over the response of log r, each clipped on the side of A's sign)", "--mismatch-preset gmpo",
        "verl loss_mode geo_mean; TRL GMPOTrainer"),
    Method("VESPO", "arXiv 2602.10693",
        "−sg(W^k e^(λ (1 − W))) A log π_θ, W = Π ρ of the response, k and λ by the sign of A",
        "--mismatch-preset vespo", "TRL loss_type vespo"),
    Method("TOPR", "arXiv 2503.14286", "−sg(w) A log π_θ: w = 1 where A ≥ 0, else min(Π ρ, 1)",
        "--mismatch-preset topr", "ROLL pg_variant topr"),
    Method("REINFORCE without a ratio", "Williams 1992", "−w A log π_θ, w of π_old",
        "--use-tis --mismatch-objective reinforce", "NeMo-RL disable_ppo_ratio"),
    Method("prime-rl's default", "prime-rl, default_loss_fn",
        "−sg(ρ_t) A log π_θ, kept where |π_θ − π_rollout| ≤ 0.2 or the step leads back, + 1e-3 l² on all tokens",
        "--use-rollout-log-probs --use-tis --tis-upper-bound inf " + _PRIME,
        "prime-rl loss.type default: the same gradient"),
    Method("prime-rl's default, its own form", "prime-rl, default_loss_fn", "−ρ_t A in place of −sg(ρ_t) A log π_θ",
        "--use-rollout-log-probs --mismatch-eps-clip-low 1 --mismatch-eps-clip-high inf " + _PRIME,
        "prime-rl loss.type default; on a trainer with a clip of its own give that these bounds"),
    Method("Unbiased KL", "DeepSeek-V3.2, arXiv 2512.02556",
        "sg(w) (log π_θ − log π_ref)²/2; its mean gradient is that of each state's KL(π_θ‖π_ref) only with unbounded "
        "prefix or sequence weights, in algorithm 2 while π_θ is π_old",
        "--use-tis --mismatch-kl-coef 1e-3 --mismatch-kl-type k2 --mismatch-kl-importance-weighted",
        "slime --use-unbiased-kl (r k3, with the gradient of r)"),
    Method("Group without the rejected", "GRPO with valid responses only",
        "A = (R − mean of accepted)/(deviation of accepted)",
        "--rs-criterion sequence_mean:k3:0.01 --rs-group exclude", "NeMo-RL valid_mask"),
    Method("Limit on staleness", "partial rollouts", "tokens of more than n versions before are dropped",
        "--rs-max-staleness 2", "miles --mask-offpolicy-in-partial-rollout: what an earlier rollout sampled. Not its "
        "--max-weight-staleness: that samples whole groups again, by the engine's version"),
    Method("Sampling mask", "miles #1521, SGLang #27408", "π_θ over the ids that top-p, top-k, min-p left", "",
        "needs no flag: masks come with the samples (docs/rollouts.md)"),
)

NOT_YET = (
    Method("CTPO", "arXiv 2605.07331",
        "−min(R A, clip(R) A) with R = Π_{k≤t} r_k, clipped to [e^(−0.025 √t), e^(0.05 √t)]; a clip of π_θ/π_old, no "
        "bounds of a weight", "", "its fork of verl: cum-token-cumprod-la, with a dual clip at e^(0.05 √t)"),
)
"""Not available yet."""

NOT_BUILT = (
    (
        "A-3PO (log-linear anchor)",
        "π_old is made of π_rollout and π_θ, which hides the gap between engines",
    ),
    ("Adaptive learning rate, Lagrangians", "control of the optimizer, which is the host's"),
    (
        "Routing replay, batch-invariant kernels",
        "remove the gap at its source, in engine and trainer: `inspect` says whether they work",
    ),
)
# fmt: on
"""(method, why it is no setting)."""


class Equality(NamedTuple):
    """What a method was compared with. test: file::function under tests/ that does it. but: where the two differ."""

    method: str
    equals: str
    to: str
    test: str
    but: str


EQUALITIES = (
    Equality(
        "prefix_is against token_is",
        "their bias, by enumeration",
        "below it",
        "core/test_loss_enumeration.py::test_prefix_is_has_less_bias_than_token_is",
        "responses of up to four tokens, advantages Q, π_θ = π_old",
    ),
    Equality(
        "Unbiased KL",
        "the gradient of the mean KL, by enumeration",
        "1e-10",
        "test_methods_page.py::test_whose_gradient_a_weighted_kl_has",
        "not for token or bounded weights; of k2 that of KL(π_θ‖π_ref), of k3 that of KL(π_ref‖π_θ)",
    ),
    Equality(
        "prime-rl's default, KPop in AReaL",
        "their formulas",
        "1e-12",
        "test_methods_page.py::test_the_formula_of_a_method",
        "ours keep ρ within e^±20, theirs have no bound",
    ),
    Equality(
        "GSPO",
        "NeMo-RL, and so slime",
        "1e-6",
        "core/test_peers.py::test_gspo_cispo_and_reinforce_are_nemo_rl_s",
        "their gradient passes through the sequence's mean, ours through each token: equal where advantage "
        "and weight are constant in a response, elsewhere theirs is the mean of ours",
    ),
    Equality(
        "GSPO, CISPO",
        "verl 0.9.1",
        "1e-6",
        "hooks/verl_live/test_losses.py::test_objectives_in_the_block_equal_verl_s_loss_modes",
        "verl bounds log s to 10 and has no dual clip there; its decoupled driver takes rejected tokens out"
        " of the mean",
    ),
    Equality(
        "GSPO, CISPO",
        "slime and miles whole, by --advantage-estimator",
        "2e-5; miles 8e-3 (its cross entropy is bf16)",
        "hooks/slime/test_host.py::test_slime_s_own_loss_means_the_same",
        NOTHING,
    ),
    Equality(
        "GSPO, CISPO, REINFORCE",
        "NeMo-RL",
        "1e-6",
        "core/test_peers.py::test_gspo_cispo_and_reinforce_are_nemo_rl_s",
        "a dual clip under disable_ppo_ratio compares c with log π there; here it is refused",
    ),
    Equality(
        "SAPO",
        "verl, and so SkyRL and TRL",
        "1e-9",
        "core/test_peers.py::test_sapo_gmpo_and_gamma_are_verl_s_and_trl_s",
        "verl takes seq-mean-token-mean whatever loss_agg_mode says",
    ),
    Equality(
        "GMPO",
        "verl, and so TRL",
        "1e-6",
        "core/test_peers.py::test_sapo_gmpo_and_gamma_are_verl_s_and_trl_s",
        "under seq-mean-token-mean, advantage and weight constant in a response; verl's weights enter as their "
        "geometric mean",
    ),
    Equality(
        "GSPO, CISPO, SAPO, GMPO at θ = anchor",
        "REINFORCE's gradient, by enumeration",
        "1e-10",
        "core/test_loss_enumeration.py::test_at_the_anchor_every_objective_has_reinforces_gradient",
        NOTHING,
    ),
    Equality(
        "VESPO",
        "TRL",
        "1e-9",
        "core/test_peers.py::test_sapo_gmpo_and_gamma_are_verl_s_and_trl_s",
        "TRL keeps W above 1e-8 and each token's ratio within e^±20; ours keep W within e^±20",
    ),
    Equality(
        "M2PO",
        "AReaL",
        "the same tokens, but for those within a bin (2.3 %) of its cut",
        "core/test_peers.py::test_m2po_keeps_what_areal_keeps",
        "AReaL sorts each micro-batch; here the step before gives the cut, and the first step rejects l² > 0.04",
    ),
    Equality(
        "DPPO-TV, DPPO-KL",
        "verl 0.9.1",
        "1e-6",
        "hooks/verl_live/test_losses.py::test_objectives_in_the_block_equal_verl_s_loss_modes",
        "verl adds 1e-8 inside its logarithms, we keep probabilities in [1e-6, 1 − 1e-6]",
    ),
    Equality(
        "OPSM",
        "TRL 1.16.0, slime",
        "the same masks",
        "core/test_peers.py::test_dppo_is_verl_s_and_opsm_trl_s_and_slime_s",
        "slime takes each token's advantage, and by default π_old for π_rollout; TRL counts NaN as no "
        "divergence (policy neutral)",
    ),
    Equality(
        "Per-decision weights with A_t = Q(s_t, a_t)",
        "the true gradient, by enumeration",
        "1e-10",
        "core/test_loss_enumeration.py::test_prefix_weights_with_action_values_are_the_true_gradient",
        "token weights do not equal it; with one advantage a response neither do these",
    ),
    Equality(
        "Turn weights",
        "the true gradient where turns are independent, and not elsewhere",
        "1e-10",
        "core/test_loss_enumeration.py::test_turn_weights_are_exact_only_where_turns_know_nothing_of_each_other",
        "[when they are exact](algorithms.md#turns-and-prefixes)",
    ),
    Equality(
        "Group without the rejected",
        "NeMo-RL's valid_mask",
        "1e-6",
        "hooks/nemo_rl/test_groups.py::test_nemo_rls_valid_mask_is_group_advantages",
        "leave-one-out and scaled: NeMo-RL divides by the deviation of the others",
    ),
    Equality(
        "Group without the rejected",
        "∇E[R | accepted], by enumeration",
        "1e-10",
        "core/test_groups.py::test_the_gradient_by_enumeration",
        "keep adds (E[R | accepted] − E[R]) ∇log P(accepted): a push towards being accepted. verl #6375's "
        "data give −49.5 there and 0 here",
    ),
    Equality(
        "Sampling mask",
        "mean ρ and gradient of the filtered policy, by enumeration",
        "1e-10",
        "hooks/megatron_core/test_sampling_mask.py::test_mean_ratio_is_the_kept_mass_without_masks_and_one_with_them",
        "without masks mean ρ is the kept mass",
    ),
)


def equalities_table() -> Table:
    """What each method was compared with, and where the two differ."""
    headers = ("method", "equals", "to", "test", "but")
    return Table("Equalities", headers, EQUALITIES, code=frozenset({"test"}))


def methods_table() -> Table:
    """Every method with the flags that give it here, and those that nothing gives yet."""
    rows = [(m.name, m.source, m.formula, m.flags or NOTHING, m.elsewhere) for m in METHODS]
    rows += [(m.name, m.source, m.formula, NOTHING, f"not available yet ({m.elsewhere})") for m in NOT_YET]
    rows = tuple((*row[:4], row[4].removesuffix(f" ({NOTHING})")) for row in rows)
    return Table("Methods", ("method", "source", "per token", "flags", "elsewhere"), rows, code=frozenset({"flags"}))


def not_built_table() -> Table:
    """Methods that are no setting, and why."""
    return Table("Not built", ("method", "why"), NOT_BUILT)


TABLES: dict[str, Callable[[], Table]] = {
    "methods": methods_table,
    "equalities": equalities_table,
    "not-built": not_built_table,
}
