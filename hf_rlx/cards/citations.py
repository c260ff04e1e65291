"""The paper of each algorithm, for the end of a card."""

from __future__ import annotations

from typing import NamedTuple


class Paper(NamedTuple):
    """key: of the BibTeX entry. authors: in BibTeX's form. arxiv: identifier. year: of its first version."""

    key: str
    title: str
    authors: str
    arxiv: str
    year: int

    def bibtex(self) -> str:
        """The entry, as arXiv gives it."""
        return (
            f"@misc{{{self.key},\n"
            f"  title = {{{self.title}}},\n"
            f"  author = {{{self.authors}}},\n"
            f"  year = {{{self.year}}},\n"
            f"  eprint = {{{self.arxiv}}},\n"
            "  archivePrefix = {arXiv}\n"
            "}"
        )


INSTRUCT_GPT = Paper(
    "ouyang2022instructgpt",
    "Training language models to follow instructions with human feedback",
    "Long Ouyang and Jeff Wu and Xu Jiang and others",
    "2203.02155",
    2022,
)
DEEPSEEK_MATH = Paper(
    "shao2024deepseekmath",
    "{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    "Zhihong Shao and Peiyi Wang and Qihao Zhu and others",
    "2402.03300",
    2024,
)
DPO = Paper(
    "rafailov2023dpo",
    "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
    "Rafael Rafailov and Archit Sharma and Eric Mitchell and Stefano Ermon and Christopher D. Manning and "
    "Chelsea Finn",
    "2305.18290",
    2023,
)
PAPERS: dict[str, tuple[Paper, ...]] = {
    "sft": (INSTRUCT_GPT,),
    "reward": (INSTRUCT_GPT,),
    "grpo": (DEEPSEEK_MATH,),
    "ppo": (
        Paper(
            "schulman2017ppo",
            "Proximal Policy Optimization Algorithms",
            "John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov",
            "1707.06347",
            2017,
        ),
        INSTRUCT_GPT,
    ),
    "dpo": (DPO,),
    "ipo": (
        Paper(
            "azar2023ipo",
            "A General Theoretical Paradigm to Understand Learning from Human Preferences",
            "Mohammad Gheshlaghi Azar and Mark Rowland and Bilal Piot and Daniel Guo and Daniele Calandriello and "
            "Michal Valko and R{\\'e}mi Munos",
            "2310.12036",
            2023,
        ),
    ),
    "simpo": (
        Paper(
            "meng2024simpo",
            "{SimPO}: Simple Preference Optimization with a Reference-Free Reward",
            "Yu Meng and Mengzhou Xia and Danqi Chen",
            "2405.14734",
            2024,
        ),
    ),
    "orpo": (
        Paper(
            "hong2024orpo",
            "{ORPO}: Monolithic Preference Optimization without Reference Model",
            "Jiwoo Hong and Noah Lee and James Thorne",
            "2403.07691",
            2024,
        ),
    ),
    "iterative_dpo": (
        Paper(
            "xu2023cringe",
            "Some things are more {CRINGE} than others: Iterative Preference Optimization with the Pairwise Cringe "
            "Loss",
            "Jing Xu and Andrew Lee and Sainbayar Sukhbaatar and Jason Weston",
            "2312.16682",
            2023,
        ),
        DPO,
    ),
    "prm": (
        Paper(
            "lightman2023prm",
            "Let's Verify Step by Step",
            "Hunter Lightman and Vineet Kosaraju and Yura Burda and others",
            "2305.20050",
            2023,
        ),
    ),
    "dapo": (
        Paper(
            "yu2025dapo",
            "{DAPO}: An Open-Source {LLM} Reinforcement Learning System at Scale",
            "Qiying Yu and Zheng Zhang and Ruofei Zhu and others",
            "2503.14476",
            2025,
        ),
    ),
    "dr_grpo": (
        Paper(
            "liu2025drgrpo",
            "Understanding {R1-Zero-Like} Training: A Critical Perspective",
            "Zichen Liu and Changyu Chen and Wenjun Li and others",
            "2503.20783",
            2025,
        ),
    ),
    "gspo": (
        Paper(
            "zheng2025gspo",
            "Group Sequence Policy Optimization",
            "Chujie Zheng and Shixuan Liu and Mingze Li and others",
            "2507.18071",
            2025,
        ),
    ),
    "rloo": (
        Paper(
            "ahmadian2024rloo",
            "Back to Basics: Revisiting {REINFORCE} Style Optimization for Learning from Human Feedback in {LLMs}",
            "Arash Ahmadian and Chris Cremer and Matthias Gall{\\'e} and others",
            "2402.14740",
            2024,
        ),
    ),
}


def papers_of(method: str, variant: str | None = None) -> list[Paper]:
    """The papers of an algorithm and of its relative; none for a method that is not known here.

    Args:
        method: as in `RunFacts`. variant: a further key of `PAPERS`.
    """
    found = [*PAPERS.get(method, ()), *(PAPERS.get(variant, ()) if variant else ())]
    return list(dict.fromkeys(found))
