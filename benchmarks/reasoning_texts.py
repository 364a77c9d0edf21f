"""Chains of thought as public models write them for word problems, competition problems, figures and charts.

Each scenario is a list of steps with several wordings; a text takes one wording of each, in one of several layouts, with
second thoughts between them and a second pass where it is to be long.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

SHORTEST, LONGEST = 800, 4000


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of problem, and what a model writes on its way."""

    question: str
    steps: tuple[tuple[str, ...], ...]
    """Of each step its wordings."""


SHOP = Scenario(
    question="Maria buys {b} notebooks at ${a} each and {c} pens at ${d} each, and pays with a coupon. How much is left?",
    steps=(
        (
            "Maria buys {b} notebooks, and each of them costs ${a}.\nSo the notebooks cost {b} * {a} = ${ab} in total.",
            "First, calculate the total cost of the notebooks: $$ {b} \\times {a} = {ab} \\text{{ dollars}} $$",
            "To find what she spends on notebooks, we multiply the price by the quantity: ${a} x {b} = ${ab}.",
        ),
        (
            "The pens are cheaper: {c} of them at ${d} each is {c} * {d} = <<{c}*{d}={cd}>>{cd} dollars.",
            "Next, the cost of the {c} pens: \\[ {c} \\times {d} = {cd} \\]",
            "She also buys {c} pens, which adds \\${cd} (since {c} × {d} = {cd}).",
        ),
        (
            "Adding the two amounts together gives {ab} + {cd} = {total}.",
            "So the bill before the discount is $\\${ab} + \\${cd} = \\${total}$.",
            "Total: \\begin{{align*}} \\text{{Total}} &= {ab} + {cd} \\\\ &= {total} \\end{{align*}}",
        ),
        (
            "Now the question says that the coupon takes {p}% off, so I need {p}/100 * {total}, which is about {part}.",
            "A {p}% discount means she pays {q}% of the price, that is $0.{q} \\times {total}$.",
            "The discount is $\\frac{{{p}}}{{100}} \\times {total} \\approx {part}$ dollars.",
        ),
        (
            "After that we still have to take away the ${a} that she had already paid, because it is part of the total.",
            "Remember that the first notebook was already paid for, so we subtract {a} from what is left.",
        ),
    ),
)
TRIP = Scenario(
    question="A train leaves at {a} km/h and a second one follows {small} hours later at {b} km/h. When does it catch up?",
    steps=(
        (
            "Let $t$ be the number of hours since the first train left. Its position is then $d_1 = {a}t$.",
            "Let's denote by t the time in hours. The first train covers {a}t kilometers.",
            "We can set up an equation. Distance = speed × time, so for the first train: distance = {a}t km.",
        ),
        (
            "The second train starts {small} hours later, so it has been moving for $t - {small}$ hours: "
            "$$d_2 = {b}(t - {small}) = {b}t - {bsmall}.$$",
            "The second train travels for only (t - {small}) hours, so its distance is {b}(t - {small}).",
        ),
        (
            "They meet when $d_1 = d_2$: \\begin{{align*}} {a}t &= {b}t - {bsmall} \\\\ {diff}t &= {bsmall} \\\\ "
            "t &= \\frac{{{bsmall}}}{{{diff}}} \\end{{align*}}",
            "Setting them equal, {a}t = {b}t - {bsmall}. Subtracting {b}t from both sides leaves -{diff}t = -{bsmall}.",
        ),
        (
            "So in the first {small} hours, the first train is already {a} * {small} = {asmall} km ahead. The gap of "
            "{asmall} km closes at {b} - {a} = {diff} km per hour.",
            "Another way of seeing it: the relative speed is ${b} - {a} = {diff}$ km/h and the head start is {asmall} km.",
        ),
        (
            "Converting the hours into minutes would mean multiplying by 60, but the question only asks for the final value.",
            "The units are consistent: km divided by km/h leaves hours, as it should be.",
        ),
    ),
)
WAGES = Scenario(
    question="Tom works {a} hours a week for ${b} an hour, and overtime counts {c}% more. What does he earn in {d} weeks?",
    steps=(
        (
            "**Regular pay.** Tom works {a} hours at ${b} per hour, so that is {a} × {b} = ${ab} every week.",
            "He earns {a} * {b} = ${ab} for the regular hours of one week.",
            "1. Calculate the regular weekly pay:\n   \\[ {a} \\text{{ hours}} \\times {b} \\text{{ dollars/hour}} = {ab} "
            "\\text{{ dollars}} \\]",
        ),
        (
            "**Overtime pay.** An hour of overtime is paid {c}% more, i.e. {b} * 1.{c}, for each of the {small} extra hours.",
            "2. The overtime rate is $1.{c} \\times {b}$ dollars per hour, and he works {small} hours of overtime.",
        ),
        (
            "Over {d} weeks the regular pay alone adds up to {d} * {ab} = {abd}.",
            "3. Multiply by the number of weeks: $$ {ab} \\times {d} = {abd} $$",
        ),
        (
            "Then I have to be careful: the bonus of ${total} is paid once and not every week.",
            "Note that the one-time payment of {total} dollars must not be multiplied by {d}.",
        ),
        (
            "Taxes are not mentioned, so we don't subtract anything else here.",
            "There's no mention of deductions in the problem, so I will assume that he keeps all of it.",
        ),
    ),
)
QUADRATIC = Scenario(
    question="Let $r$ and $s$ be the roots of $x^2 - {ab1}x + {ab} = 0$. Find the requested expression.",
    steps=(
        (
            "By Vieta's formulas, we know that $r + s = {ab1}$ and $rs = {ab}$.",
            "Recall that for $x^2 + px + q = 0$ the sum of the roots is $-p$ and the product is $q$. Hence \\[ r + s = {ab1}, "
            "\\qquad rs = {ab}. \\]",
            "We have the quadratic $x^2 - {ab1}x + {ab} = 0$. Vieta's formulas tell us that the sum is {ab1} and the product {ab}.",
        ),
        (
            "Then $r^2 + s^2 = (r+s)^2 - 2rs = {ab1}^2 - 2 \\cdot {ab} = {vieta}$.",
            "Squaring the sum, $(r + s)^2 = r^2 + 2rs + s^2$, so $r^2 + s^2 = {vieta}$ after subtracting $2rs$.",
        ),
        (
            "The discriminant is \\[ \\Delta = b^2 - 4ac = {ab1}^2 - 4({ab}) = {diff}^2, \\] which is positive, so both roots are "
            "real and distinct.",
            "We can check with the quadratic formula: $x = \\frac{{{ab1} \\pm \\sqrt{{{ab1}^2 - 4 \\cdot {ab}}}}}{{2}}$.",
        ),
        (
            "Factoring also works here, since $x^2 - {ab1}x + {ab} = (x - {a})(x - {b})$.",
            "Alternatively, we look for two numbers with product ${ab}$ and sum ${ab1}$: these are ${a}$ and ${b}$.",
        ),
        (
            "Finally, $\\frac{{1}}{{r}} + \\frac{{1}}{{s}} = \\frac{{r+s}}{{rs}} = \\frac{{{ab1}}}{{{ab}}}$, and we substitute this into "
            "the expression that we were asked for.",
            "For the cubes we would use $r^3 + s^3 = (r+s)^3 - 3rs(r+s)$ in the same way.",
        ),
    ),
)
SERIES = Scenario(
    question="An arithmetic sequence has first term ${a}$ and common difference ${small}$. Evaluate the sum that is asked for.",
    steps=(
        (
            "The $n$-th term is $a_n = a_1 + (n-1)d = {a} + {small}(n-1)$.",
            "We start with the general formula $a_n = a_1 + (n - 1)d$, and with $a_1 = {a}$ and $d = {small}$ that's "
            "$a_n = {small}n + {first}$.",
        ),
        (
            "So $a_{{{b}}} = {a} + {small} \\cdot ({b} - 1) = {last}$.",
            "Plugging in $n = {b}$: \\begin{{align*}} a_{{{b}}} &= {a} + {small}({b} - 1) \\\\ &= {last}. \\end{{align*}}",
        ),
        (
            "The sum of the first $n$ terms is $S_n = \\frac{{n}}{{2}}(a_1 + a_n)$, therefore $$S_{{{b}}} = \\frac{{{b}}}{{2}}"
            "({a} + {last}).$$",
            "Using $S_n = \\frac{{n(a_1+a_n)}}{{2}}$ we obtain $\\frac{{{b} \\cdot ({a} + {last})}}{{2}}$ for the whole sum.",
        ),
        (
            "If the sequence were geometric, the ratio $\\frac{{a_2}}{{a_1}}$ would have to be constant, which it is not.",
            "Notice that the terms are all congruent to ${a}$ modulo ${small}$, which is a good sanity check.",
        ),
        (
            "The series telescopes: \\[ \\sum_{{k=1}}^{{{b}}} \\left( \\frac{{1}}{{k}} - \\frac{{1}}{{k+1}} \\right) = 1 - "
            "\\frac{{1}}{{{b1}}}. \\]",
            "Partial fractions give $\\frac{{1}}{{k(k+1)}} = \\frac{{1}}{{k}} - \\frac{{1}}{{k+1}}$, so almost all of it cancels.",
        ),
    ),
)
COUNTING = Scenario(
    question="In how many ways can {a} people be seated if {small} of them insist on sitting together?",
    steps=(
        (
            "Treat the {small} people as a single block. Then there are ${a} - {small} + 1$ objects to arrange.",
            'A standard trick is to glue the {small} people together into one "super-person".',
        ),
        (
            "Within the block, the {small} people can be permuted in ${small}!$ ways.",
            "The block itself can be arranged internally in ${small}! = {smallfact}$ ways, independently of everything else.",
        ),
        (
            "We choose which seats they take in $\\binom{{{a}}}{{{small}}}$ ways, and by the multiplication principle the counts "
            "multiply.",
            "There are $\\binom{{{a}}}{{{small}}} = \\frac{{{a}!}}{{{small}!({a}-{small})!}}$ ways of choosing the group.",
        ),
        (
            "By complementary counting, we could subtract the arrangements in which none of them are adjacent.",
            "Let's use inclusion-exclusion: $|A \\cup B| = |A| + |B| - |A \\cap B| = {b} + {c} - {small}$.",
        ),
        (
            "The probability would then be $\\frac{{\\text{{favorable}}}}{{\\text{{total}}}} = \\frac{{{small}}}{{{b}}}$, and it simplifies if "
            "they share a factor.",
            "Case 1: the block is at an end. There are 2 such positions.\nCase 2: the block is in the middle. There are "
            "{small} positions.",
        ),
    ),
)
MODULAR = Scenario(
    question="What is the remainder when ${a}^{{{b}}}$ is divided by ${c}$?",
    steps=(
        (
            "We work modulo ${c}$. First, ${a} \\equiv {amodc} \\pmod{{{c}}}$.",
            "Let us reduce the base: ${a} = {c} \\cdot {adivc} + {amodc}$, so ${a} \\equiv {amodc} \\pmod{{{c}}}$.",
        ),
        (
            "Looking at the powers: ${amodc}^1 \\equiv {amodc}$, ${amodc}^2 \\equiv {a2modc}$, and so on; they repeat eventually.",
            "The powers cycle, \\[ {amodc}, {a2modc}, \\ldots \\pmod{{{c}}}, \\] so all that matters is the exponent modulo the length "
            "of the cycle.",
        ),
        (
            "By Euler's theorem, $a^{{\\phi(n)}} \\equiv 1 \\pmod n$ whenever $\\gcd(a, n) = 1$.",
            "Fermat's little theorem only applies if ${c}$ is prime, so let me look at that more carefully.",
        ),
        (
            "Therefore ${a}^{{{b}}} \\equiv {apowbmodc} \\pmod{{{c}}}$.",
            "Writing ${b}$ in binary and squaring repeatedly, we end up with ${apowbmodc}$.",
        ),
        (
            "The Chinese Remainder Theorem lets us put the residues together, which gives a unique value below ${cd}$.",
            "In base {small} this is a number with more digits, but the residue stays what it is.",
        ),
    ),
)
LOGARITHM = Scenario(
    question="Solve for $x$: $\\log_{{{small}}}(x - {a}) + \\log_{{{small}}}(x + {b}) = {d}$.",
    steps=(
        (
            "Using $\\log u + \\log v = \\log(uv)$, the left-hand side becomes $\\log_{{{small}}}\\big((x - {a})(x + {b})\\big)$.",
            "First we combine the logarithms: \\[ \\log_{{{small}}} \\left[ (x-{a})(x+{b}) \\right] = {d}. \\]",
        ),
        (
            "Exponentiating, $(x - {a})(x + {b}) = {small}^{{{d}}}$.",
            "By the definition of the logarithm, $(x-{a})(x+{b})$ must equal ${small}^{{{d}}}$.",
        ),
        (
            "Expanding, $x^2 + {diff}x - {ab} - {small}^{{{d}}} = 0$, a quadratic in $x$.",
            "Expand the product: $x^2 + ({b} - {a})x - {ab}$. This is a quadratic equation.",
        ),
        (
            "The domain requires $x > {a}$ and $x > -{b}$, i.e. $x \\in ({a}, \\infty)$, so we discard the negative root.",
            "Since we cannot take the logarithm of a negative number, $x > {a}$ has to hold.",
        ),
        (
            "Note that $f(x) = \\sqrt{{x + {c}}}$ is increasing on its domain $[-{c}, \\infty)$, so there's at most one solution.",
            "The derivative is $f'(x) = \\frac{{1}}{{x - {a}}} + \\frac{{1}}{{x + {b}}}$, which is positive there.",
        ),
    ),
)
RIGHT_TRIANGLE = Scenario(
    question="In the figure, $\\triangle ABC$ has a right angle at $C$, $AC = {a}$ and $BC = {b}$. Find the marked length.",
    steps=(
        (
            "Since $\\angle C = 90^\\circ$, the Pythagorean theorem applies: $AB^2 = AC^2 + BC^2 = {a}^2 + {b}^2 = {hyp2}$.",
            "From the image, triangle ABC is right-angled at C, with legs AC = {a} and BC = {b}. So AB = √({a}² + {b}²) = √{hyp2}.",
        ),
        (
            "The area is $\\frac{{1}}{{2}} \\cdot {a} \\cdot {b}$, which also equals $\\frac{{1}}{{2}} \\cdot AB \\cdot h$, where $h$ is the "
            "altitude to the hypotenuse.",
            "Let $CD$ be the altitude to the hypotenuse. Computing the area in two ways, $AC \\cdot BC = AB \\cdot CD$.",
        ),
        (
            "Therefore $\\tan A = \\frac{{BC}}{{AC}} = \\frac{{{b}}}{{{a}}}$ and $\\sin A = \\frac{{{b}}}{{\\sqrt{{{hyp2}}}}}$.",
            "Using trigonometry, $\\cos \\angle A = \\frac{{{a}}}{{\\sqrt{{{hyp2}}}}}$.",
        ),
        (
            "Because $D$ is the midpoint of the hypotenuse, $CD = \\frac{{1}}{{2}} AB$, the median to the hypotenuse.",
            "The median from the right angle is half as long as the hypotenuse, so it is $\\frac{{\\sqrt{{{hyp2}}}}}{{2}}$.",
        ),
        (
            "∵ ∠ACB = 90°, ∴ the circumcenter lies on AB, and the circumradius is AB/2.",
            "The diagram shows that the marked segment is parallel to $BC$, so the two triangles are similar.",
        ),
    ),
)
CIRCLE = Scenario(
    question="Points $A$, $B$, $C$ lie on circle $\\odot O$, $\\angle AOB = {a}^\\circ$ and $\\angle OBC = {c}^\\circ$. Find the angle.",
    steps=(
        (
            "The inscribed angle theorem says that an inscribed angle is half of the central angle on the same arc: "
            "$\\angle ACB = \\frac{{1}}{{2}} \\angle AOB = \\frac{{{a}^\\circ}}{{2}}$.",
            "Since ∠AOB = {a}° is a central angle, the inscribed angle ∠ACB that subtends the same arc is {a}°/2.",
        ),
        (
            "As $OB = OC$ are both radii, triangle $OBC$ is isosceles, and $\\angle OCB = \\angle OBC = {c}^\\circ$.",
            "OB = OC (radii of the same circle), therefore ∠OCB = ∠OBC = {c}°.",
        ),
        (
            "The angles of triangle $OBC$ add up to $180^\\circ$, so $\\angle BOC = 180^\\circ - 2 \\cdot {c}^\\circ = {rest}^\\circ$.",
            "Hence \\[ \\angle BOC = 180^\\circ - {c}^\\circ - {c}^\\circ = {rest}^\\circ. \\]",
        ),
        (
            "A tangent is perpendicular to the radius at the point of contact, which gives another right angle in the figure.",
            "If $AB$ is a diameter then $\\angle ACB$ would be $90^\\circ$ by Thales' theorem, but it isn't given here.",
        ),
        (
            "The arc length would be $\\frac{{{a}}}{{360}} \\cdot 2\\pi r$ and the sector's area $\\frac{{{a}}}{{360}} \\cdot \\pi r^2$.",
            "With radius $r = {b}$, the area is $\\pi r^2 = {b2}\\pi$ and the circumference $2\\pi r = {bb}\\pi$.",
        ),
    ),
)
PARALLELS = Scenario(
    question="As shown in the figure, $AB \\parallel CD$, $\\angle 1 = {a}^\\circ$ and $\\angle 2 = {c}^\\circ$. Find $\\angle 3$.",
    steps=(
        (
            "Because $AB \\parallel CD$, the alternate interior angles are equal, so $\\angle 1 = \\angle BFE = {a}^\\circ$.",
            "First, identify what is given in the image: AB is parallel to CD, ∠1 = {a}°, and ∠2 = {c}°.",
        ),
        (
            "The angles on a straight line add up to $180^\\circ$: $\\angle 2 + \\angle 4 = 180^\\circ$, and so $\\angle 4 = "
            "180^\\circ - {c}^\\circ = {supp}^\\circ$.",
            "∠4 and ∠2 are supplementary, therefore ∠4 = 180° − {c}° = {supp}°.",
        ),
        (
            "Draw a line $EG$ through $E$ parallel to $AB$. Then $EG \\parallel CD$ too, and the angle at $E$ splits into two parts.",
            "Let me draw an auxiliary line through point E that is parallel to both AB and CD.",
        ),
        (
            "An exterior angle of a triangle equals the sum of the two remote interior angles: ${a}^\\circ + {c}^\\circ = {ac}^\\circ$.",
            "By the exterior angle theorem, the angle at F is {a}° + {c}° = {ac}°.",
        ),
        (
            "The angle bisector divides the angle into two equal halves, of $\\frac{{{supp}^\\circ}}{{2}}$ each.",
            "Corresponding angles would have given the same relation.",
        ),
    ),
)
SIMILAR = Scenario(
    question="In $\\triangle ABC$, $DE \\parallel BC$ with $AD = {a}$, $DB = {b}$ and $DE = {c}$. Find what is asked.",
    steps=(
        (
            "Since $DE \\parallel BC$, $\\triangle ADE \\sim \\triangle ABC$ by AA similarity.",
            "DE ∥ BC implies ∠ADE = ∠ABC and ∠AED = ∠ACB, so △ADE ∼ △ABC.",
        ),
        (
            "Thus \\[ \\frac{{AD}}{{AB}} = \\frac{{DE}}{{BC}} = \\frac{{AE}}{{AC}}. \\] Here $AB = AD + DB = {a} + {b} = {sum}$.",
            "The ratio of similarity is $\\frac{{AD}}{{AB}} = \\frac{{{a}}}{{{sum}}}$.",
        ),
        (
            "Cross-multiplying, $BC = \\frac{{{c} \\cdot {sum}}}{{{a}}}$.",
            "So $\\frac{{{a}}}{{{sum}}} = \\frac{{{c}}}{{BC}}$, and solving for $BC$ gives $\\frac{{{sum} \\times {c}}}{{{a}}}$.",
        ),
        (
            "The areas are in the ratio of the squares of the sides, $\\left( \\frac{{{a}}}{{{sum}}} \\right)^2$.",
            "Note that the area ratio is the square of the ratio of the sides, i.e. ${a}^2 : {sum}^2$.",
        ),
        (
            "The trapezoid's area is the difference of the areas of the two triangles.",
            "Subtracting, $[DBCE] = [ABC] - [ADE]$, where $[\\cdot]$ denotes the area.",
        ),
    ),
)
BARS = Scenario(
    question="By how much does the value for {year} in the bar chart exceed the average of the other years?",
    steps=(
        (
            "Looking at the chart, the bar for {year} is at {a}.{small} and the one for {next} at {b}.{d}.",
            "From the bar chart, I can read the following values:\n- {year}: {a}.{small}%\n- {next}: {b}.{d}%\n- {after}: {c}%",
        ),
        (
            "The legend tells us that the dark blue bars stand for the share of adults who agree, {a}% in this case.",
            'The y-axis is labeled "Share of respondents" and goes from 0% to 100%, in steps of 10%.',
        ),
        (
            "The difference between the two is {b} - {a} = {diff} percentage points.",
            "Now, I compare the highest bar with the lowest one: the difference is {diff}.",
        ),
        (
            "To calculate the average: ({a} + {b} + {c}) / 3 = {mean:.2f}.",
            "The sum of the three values is {a} + {b} + {c} = {abc}, and divided by 3 that is approximately {mean:.2f}.",
        ),
        (
            "So the category with the largest value is not the one that the question is about; the second bar from the left is.",
            "Note that the green bar is missing for {after}, so only the others can be compared.",
        ),
    ),
)
LINES = Scenario(
    question="In which year did the line for exports cross the one for imports, and what was the gap in {year}?",
    steps=(
        (
            "The line graph shows two lines: exports in orange and imports in blue, from {year} to {after}.",
            "The image is a line chart with the years on the x-axis ({year}-{after}) and billions of U.S. dollars on the y-axis.",
        ),
        (
            "In {year}, exports were at about {a} billion and imports at about {b} billion.",
            "For {year} the data points are labeled {a} (exports) and {b} (imports).",
        ),
        (
            "By {next} the values had changed to {c} and {total}, respectively, so the gap widened.",
            "The next data point, {next}, is {c}, which is a change of {c} − {a}.",
        ),
        (
            "The ratio between the two years is {b}/{a} = {ratio:.2f}, i.e. it grew by roughly {p}%.",
            "Percentage change = (new - old) / old × 100 = ({b} - {a}) / {a} × 100 ≈ {growth:.1f}%.",
        ),
        (
            "The two lines intersect between {next} and {after}, where the orange one overtakes the blue one.",
            "The highest point of the blue line is in {after}, as can be seen on the right of the chart.",
        ),
    ),
)
SHARES = Scenario(
    question="What is the ratio of the largest to the smallest segment of the pie chart?",
    steps=(
        (
            'The pie chart has the segments "Very satisfied" ({a}%), "Somewhat satisfied" ({b}%) and "Not satisfied" ({c}%).',
            "Reading the labels of the pie chart: Favorable {a}%, Unfavorable {b}%, No answer {c}%.",
        ),
        (
            "All of the segments must add up to 100%, so the rest is 100 - {a} - {c} = {remaining}%.",
            "The sum of the first and third segments is {a}% + {c}% = {ac}%.",
        ),
        (
            "Out of {total} people, {a}% is {total} × 0.{a} = {part2:.1f} people.",
            "Since {total} people were asked, the segment of {a}% stands for about {part2:.0f} of them.",
        ),
        (
            "The ratio of the two is {a}:{c}, or {a} / {c} ≈ {ratio2:.2f}.",
            "As a fraction, \\(\\frac{{{a}}}{{{c}}}\\) is the ratio, which can be simplified if there's a common factor.",
        ),
        (
            "The color of the largest segment is light blue according to the legend at the bottom.",
            "The smallest segment, in gray, is the one without a label of its own.",
        ),
    ),
)
TABLE = Scenario(
    question="According to the table, what is the median number of points per game?",
    steps=(
        (
            "The table lists:\n| Game | Points |\n|---|---|\n| 1 | {a} |\n| 2 | {b} |\n| 3 | {c} |\n| 4 | {total} |",
            "From the table, the numbers of points are {a}, {b}, {c} and {total}.",
        ),
        (
            "Arranging them in order from the least to the greatest, the middle of the list is between {a} and {b}.",
            "To find the median, first sort the numbers in ascending order, then take the one in the middle.",
        ),
        (
            "With an even number of entries, the median is the mean of the two in the middle: ({a} + {b}) / 2 = {half:.1f}.",
            "There are 4 numbers, so we average the second and the third: $\\frac{{{a} + {b}}}{{2}} = {half:.1f}$.",
        ),
        (
            "The mean would be ({abc} + {total}) / 4, but it's the median that is asked for.",
            "The range is the difference of the greatest and the smallest number, which we don't need here.",
        ),
        (
            "The mode does not exist since no number occurs twice.",
            "If one more game was played, the mean would change to a value that I can't tell from the table.",
        ),
    ),
)
SCENARIOS: dict[str, tuple[Scenario, ...]] = {
    "word problems": (SHOP, TRIP, WAGES),
    "competition": (QUADRATIC, SERIES, COUNTING, MODULAR, LOGARITHM),
    "figures": (RIGHT_TRIANGLE, CIRCLE, PARALLELS, SIMILAR),
    "charts": (BARS, LINES, SHARES, TABLE),
}
OPENINGS = (
    "Okay, so I need to find out what is asked here. Let me start by going through the problem step by step.",
    "To solve this problem, we need to follow these steps:",
    "Let's break down the problem.",
    "Let me think about this carefully.",
    "Alright, let's see what we are given.",
    "Let's solve this step by step.",
    "",
)
SECOND_THOUGHTS = (
    "Wait, let me double-check that. I had {a} and {b}, and {a} + {b} = {sum}, so that's right.",
    "Hmm, is that correct? If it were {small} instead, then the result would be off by a factor of {small}.",
    "Let me re-read the question to be sure that I didn't miss anything.",
    "Actually, hold on. I should be careful with the units here.",
    "So far so good.",
    "But wait, maybe I should consider the case where $x = {small}$ separately. In that case we'd have ${small} \\cdot {a} = "
    "{asmall}$, which doesn't change anything.",
    "I think that makes sense, because {diff} is less than {total}.",
    "Let me verify this with a small example: for $n = {small}$ it gives {smallfact}, as expected.",
    "Alternatively, one could think of it the other way around, but that leads to the same thing.",
)
SECOND_PASSES = (
    "Let me verify the result by going through it once more, in a slightly different way.",
    "Now let me double-check everything from the start.",
    "**Verification**",
    "To be sure, I'll try another approach and see if I get the same.",
)
LAYOUTS = (
    "{step}",
    "{number}. {step}",
    "**Step {number}:** {step}",
    "### Step {number}\n{step}",
    "Step {number}: {step}",
)


def reasoning(rng: random.Random, *, kind: str) -> tuple[str, str]:
    """Return a question and a chain of thought about it, of 800 to 4,000 characters, that comes to no answer yet."""
    scenario = rng.choice(SCENARIOS[kind])
    numbers = _numbers(rng)
    length = rng.randint(SHORTEST, LONGEST - 400)
    layout = rng.choice(LAYOUTS)
    pieces = [rng.choice(OPENINGS)]
    while True:
        for number, wordings in enumerate(scenario.steps, start=1):
            pieces.append(layout.format(number=number, step=rng.choice(wordings).format(**numbers)))
            if rng.random() < 0.35:
                pieces.append(rng.choice(SECOND_THOUGHTS).format(**numbers))
        if sum(map(len, pieces)) >= length:
            break
        pieces.append(rng.choice(SECOND_PASSES))
        numbers = _numbers(rng)
    text = rng.choice(("\n\n", "\n")).join(pieces).strip()
    text = text if len(text) <= LONGEST - 200 else text[: LONGEST - 200].rpartition("\n")[0]
    return scenario.question.format(**numbers), text


def wording(text: str) -> str:
    """Return a text without its numbers, by which two that say the same are told."""
    return re.sub(r"\d+", "0", text)


def _numbers(rng: random.Random) -> dict[str, float]:
    a, b, c, d, small = (*(rng.randint(11, 79) for _ in range(3)), rng.randint(2, 9), rng.randint(2, 6))
    b = b + 1 if b == a else b
    a, b = min(a, b), max(a, b)
    p, year = rng.choice((5, 10, 15, 20, 25)), rng.randint(1995, 2018)
    total = a * b + c * d
    return {
        **{"a": a, "b": b, "c": c, "d": d, "small": small, "p": p, "q": 100 - p, "year": year},
        **{"next": year + 1, "after": year + 3, "ab": a * b, "cd": c * d, "total": total, "part": total * p // 100},
        **{"bsmall": b * small, "asmall": a * small, "diff": b - a, "sum": a + b, "ab1": a + b, "abd": a * b * d},
        **{
            "vieta": a * a + b * b,
            "first": a - small,
            "last": a + small * (b - 1),
            "b1": b + 1,
            "b2": b * b,
            "bb": 2 * b,
        },
        **{"smallfact": (1, 1, 2, 6, 24, 120, 720)[small], "adivc": a // c, "amodc": a % c, "a2modc": a * a % c},
        **{"apowbmodc": pow(a, b, c), "hyp2": a * a + b * b, "rest": 180 - 2 * c, "supp": 180 - c, "ac": a + c},
        **{
            "abc": a + b + c,
            "mean": (a + b + c) / 3,
            "ratio": b / a,
            "growth": 100 * (b - a) / a,
            "half": (a + b) / 2,
        },
        **{"remaining": 100 - a, "part2": total * a / 100, "ratio2": a / c},
    }
