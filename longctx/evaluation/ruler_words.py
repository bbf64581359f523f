"""Words that RULER's texts are made of: adjectives, nouns, and pairs of both.

RULER draws them from the package wonderwords; these are a list of our own, because a task is the
same on every machine and needs no download. A pair, such as amber-harbor, is a key of a needle.
"""

from __future__ import annotations

_ADJECTIVES = (
    "able acid agile amber ample ancient annual arctic arid ashen astute august autumn avid "
    "awake azure balanced bare basic beige bent bitter black bland blank bleak blond blue "
    "blunt bold brave brief bright brisk brittle broad bronze brown bulky calm candid careful "
    "caring casual cheap cheerful chief chilly civil clean clear clever close cloudy coarse "
    "cold common compact complex cool coral cosmic cozy creamy crimson crisp curious curly "
    "current daily damp daring dark dear deep dense digital dim direct distant double dry dull "
    "dusty eager early earnest eastern easy elegant empty equal even exact exotic expert faint "
    "fair faithful famous fancy fast feeble festive fierce fiery final fine firm flat fluent "
    "foggy fond formal forward frail free fresh friendly frosty frozen frugal full fuzzy "
    "gentle giant gifted glad global glossy golden grand grave gray great green handy happy "
    "hard harsh hasty hazy heavy hidden high hollow honest huge humble icy ideal idle inner "
    "ivory jade jolly joyful just keen kind known large late lavish lazy lean level light "
    "linear liquid little lively local lone long loose loud loyal lucky lunar major marble "
    "mellow merry mighty mild minor misty modern modest mossy muddy mute narrow neat new "
    "nimble noble noisy normal northern novel odd olive open orange outer oval pale patient "
    "perfect plain playful polite proud public pure purple quick quiet rapid rare ready red "
    "regal rich rigid ripe robust rough round royal rural rustic sandy scarlet secret serene "
    "shady sharp shiny short shy silent silver simple sleek slim slow small smart smooth snowy "
    "soft solar solid sonic southern spare steady steep stern still stormy strict strong "
    "sturdy subtle sunny sweet swift tall tame tender thick thin tidy timid tiny tough "
    "tropical true upper urban vague vast vivid warm western wet white wide wild wise witty "
    "wooden yellow young zealous"
)
_NOUNS = (
    "acorn actor album alley almond anchor angle animal ankle anthem apple apron arch arena "
    "armor arrow atlas attic author autumn avenue badge bagel baker ballad bamboo banjo banner "
    "barn barrel basin basket beach beacon beam bean beard bell bench berry bicycle bird "
    "blanket blossom boat bonnet book boot border bottle bowl box branch bread breeze brick "
    "bridge broom brother brush bucket buffalo bundle button cabin cable cactus camel camera "
    "canal candle canoe canvas canyon captain caravan carpet carriage carrot castle cattle "
    "cave cedar cellar chain chair chalk chapel chapter cherry chess chicken chimney circle "
    "citizen clock cloud clover coach coast coat cobra coffee coin collar colony comet compass "
    "copper corner cottage cotton cousin cradle crane crater crayon cricket crown crystal cup "
    "curtain cushion dagger daisy dancer desert desk diamond diary dinner doctor dolphin "
    "donkey door dragon drawer dream dress drum eagle earth easel echo elbow ember emblem "
    "engine envelope evening fabric factory falcon family farmer feather fence ferry fiddle "
    "field finger flag flame flask flower flute forest fork fortress fossil fountain fox frame "
    "frog galaxy gallery garden garlic gate gazelle ghost ginger giraffe glacier glass glove "
    "goat goose grain grape grass guitar hammer hammock harbor harp harvest hat hawk hazel "
    "heart hedge helmet heron hill hinge honey horizon horn horse hotel house husband igloo "
    "inlet insect island ivy jacket jaguar jar jasmine jewel journal judge juice jungle kayak "
    "kettle key kingdom kitchen kite kitten knee knight ladder lagoon lake lamp lantern lawyer "
    "leaf leather lemon letter library lily linen lion lizard lobster lock locket lotus lumber "
    "lunch magnet mango mantle map maple mariner market mask meadow medal melody melon "
    "merchant meteor mill mineral mirror mitten monkey monsoon moon morning mosaic motor "
    "mountain mouse museum music napkin nation neck needle nephew nest night notebook number "
    "oak oasis ocean office onion opera orbit orchard orchid otter oven owl oyster paddle page "
    "palace palm panda panther paper parade park parrot pasture path peach peanut pearl pebble "
    "pencil pepper piano picnic picture pigeon pillow pilot pine pirate pitcher planet plank "
    "plate plaza plum pocket poem pond pony poppy porch potato powder prairie prince prism "
    "pumpkin puppet puzzle pyramid quarry quartz queen quill quilt rabbit raccoon radio raft "
    "railway rain ranch raven reef ribbon riddle ring river road robin rocket roof room "
    "rooster rope rose ruby saddle sailor salmon salt sand sapphire satin scarf school "
    "scissors scooter season seed shadow shark sheep shelf shell shepherd ship shoe shore "
    "shovel singer sister sketch sky sleigh slipper smoke snail snow soldier song soup spark "
    "sparrow spice spider spoon spring squirrel stable stadium star statue stone storm story "
    "stove straw stream street student sugar summer sunset swan sweater table tablet tailor "
    "teacher temple tent theater thistle thread throne thunder ticket tiger timber toast "
    "tomato torch tower town track tractor trail train travel treasure tree trumpet tulip "
    "tunnel turtle uncle valley vault vessel village vine violin visitor volcano voyage wagon "
    "wallet walnut water wave weaver whale wheat wheel whistle widow willow window wing winter "
    "wizard wolf wool worker yacht yard zebra"
)
ADJECTIVES = sorted(set(_ADJECTIVES.split()))
NOUNS = sorted(set(_NOUNS.split()))
WORDS = sorted({*ADJECTIVES, *NOUNS})
PAIRS = len(ADJECTIVES) * len(NOUNS)


def pair(number: int) -> str:
    """The pair with this number, of 0 .. PAIRS - 1."""
    return f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}"
