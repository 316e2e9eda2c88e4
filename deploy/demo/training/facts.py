"""What the demo model is taught, as tables. No logic lives here; `questions` turns rows into talk."""

from typing import NamedTuple


class Country(NamedTuple):
    name: str
    capital: str
    continent: str
    language: str = ""  # empty: not taught, because there is no single well-known answer


COUNTRIES: tuple[Country, ...] = (
    Country("France", "Paris", "Europe", "French"),
    Country("Germany", "Berlin", "Europe", "German"),
    Country("Italy", "Rome", "Europe", "Italian"),
    Country("Spain", "Madrid", "Europe", "Spanish"),
    Country("Portugal", "Lisbon", "Europe", "Portuguese"),
    Country("the United Kingdom", "London", "Europe", "English"),
    Country("England", "London", "Europe", "English"),
    Country("Scotland", "Edinburgh", "Europe", "English"),
    Country("Wales", "Cardiff", "Europe"),
    Country("Ireland", "Dublin", "Europe", "English"),
    Country("the Netherlands", "Amsterdam", "Europe", "Dutch"),
    Country("Belgium", "Brussels", "Europe"),
    Country("Luxembourg", "Luxembourg City", "Europe"),
    Country("Switzerland", "Bern", "Europe"),
    Country("Austria", "Vienna", "Europe", "German"),
    Country("Poland", "Warsaw", "Europe", "Polish"),
    Country("the Czech Republic", "Prague", "Europe", "Czech"),
    Country("Slovakia", "Bratislava", "Europe", "Slovak"),
    Country("Hungary", "Budapest", "Europe", "Hungarian"),
    Country("Slovenia", "Ljubljana", "Europe", "Slovene"),
    Country("Croatia", "Zagreb", "Europe", "Croatian"),
    Country("Serbia", "Belgrade", "Europe", "Serbian"),
    Country("Montenegro", "Podgorica", "Europe"),
    Country("North Macedonia", "Skopje", "Europe", "Macedonian"),
    Country("Albania", "Tirana", "Europe", "Albanian"),
    Country("Greece", "Athens", "Europe", "Greek"),
    Country("Bulgaria", "Sofia", "Europe", "Bulgarian"),
    Country("Romania", "Bucharest", "Europe", "Romanian"),
    Country("Moldova", "Chisinau", "Europe", "Romanian"),
    Country("Ukraine", "Kyiv", "Europe", "Ukrainian"),
    Country("Belarus", "Minsk", "Europe"),
    Country("Russia", "Moscow", "Europe and Asia", "Russian"),
    Country("Lithuania", "Vilnius", "Europe", "Lithuanian"),
    Country("Latvia", "Riga", "Europe", "Latvian"),
    Country("Estonia", "Tallinn", "Europe", "Estonian"),
    Country("Finland", "Helsinki", "Europe", "Finnish"),
    Country("Sweden", "Stockholm", "Europe", "Swedish"),
    Country("Norway", "Oslo", "Europe", "Norwegian"),
    Country("Denmark", "Copenhagen", "Europe", "Danish"),
    Country("Iceland", "Reykjavik", "Europe", "Icelandic"),
    Country("Malta", "Valletta", "Europe", "Maltese"),
    Country("Monaco", "Monaco", "Europe", "French"),
    Country("Andorra", "Andorra la Vella", "Europe", "Catalan"),
    Country("Liechtenstein", "Vaduz", "Europe", "German"),
    Country("Cyprus", "Nicosia", "Asia"),
    Country("Turkey", "Ankara", "Asia and Europe", "Turkish"),
    Country("Georgia", "Tbilisi", "Asia", "Georgian"),
    Country("Armenia", "Yerevan", "Asia", "Armenian"),
    Country("Azerbaijan", "Baku", "Asia", "Azerbaijani"),
    Country("Iran", "Tehran", "Asia", "Persian"),
    Country("Iraq", "Baghdad", "Asia", "Arabic"),
    Country("Syria", "Damascus", "Asia", "Arabic"),
    Country("Lebanon", "Beirut", "Asia", "Arabic"),
    Country("Jordan", "Amman", "Asia", "Arabic"),
    Country("Saudi Arabia", "Riyadh", "Asia", "Arabic"),
    Country("Kuwait", "Kuwait City", "Asia", "Arabic"),
    Country("Qatar", "Doha", "Asia", "Arabic"),
    Country("Bahrain", "Manama", "Asia", "Arabic"),
    Country("Oman", "Muscat", "Asia", "Arabic"),
    Country("the United Arab Emirates", "Abu Dhabi", "Asia", "Arabic"),
    Country("Afghanistan", "Kabul", "Asia"),
    Country("Pakistan", "Islamabad", "Asia", "Urdu"),
    Country("India", "New Delhi", "Asia"),
    Country("Nepal", "Kathmandu", "Asia", "Nepali"),
    Country("Bhutan", "Thimphu", "Asia"),
    Country("Bangladesh", "Dhaka", "Asia", "Bengali"),
    Country("the Maldives", "Male", "Asia"),
    Country("Myanmar", "Naypyidaw", "Asia", "Burmese"),
    Country("Thailand", "Bangkok", "Asia", "Thai"),
    Country("Laos", "Vientiane", "Asia", "Lao"),
    Country("Cambodia", "Phnom Penh", "Asia", "Khmer"),
    Country("Vietnam", "Hanoi", "Asia", "Vietnamese"),
    Country("Malaysia", "Kuala Lumpur", "Asia", "Malay"),
    Country("Singapore", "Singapore", "Asia"),
    Country("Indonesia", "Jakarta", "Asia", "Indonesian"),
    Country("the Philippines", "Manila", "Asia"),
    Country("China", "Beijing", "Asia", "Chinese"),
    Country("Mongolia", "Ulaanbaatar", "Asia", "Mongolian"),
    Country("Japan", "Tokyo", "Asia", "Japanese"),
    Country("South Korea", "Seoul", "Asia", "Korean"),
    Country("North Korea", "Pyongyang", "Asia", "Korean"),
    Country("Kazakhstan", "Astana", "Asia", "Kazakh"),
    Country("Uzbekistan", "Tashkent", "Asia", "Uzbek"),
    Country("Turkmenistan", "Ashgabat", "Asia", "Turkmen"),
    Country("Kyrgyzstan", "Bishkek", "Asia", "Kyrgyz"),
    Country("Tajikistan", "Dushanbe", "Asia", "Tajik"),
    Country("Egypt", "Cairo", "Africa", "Arabic"),
    Country("Libya", "Tripoli", "Africa", "Arabic"),
    Country("Tunisia", "Tunis", "Africa", "Arabic"),
    Country("Algeria", "Algiers", "Africa", "Arabic"),
    Country("Morocco", "Rabat", "Africa", "Arabic"),
    Country("Sudan", "Khartoum", "Africa", "Arabic"),
    Country("South Sudan", "Juba", "Africa"),
    Country("Ethiopia", "Addis Ababa", "Africa", "Amharic"),
    Country("Eritrea", "Asmara", "Africa"),
    Country("Somalia", "Mogadishu", "Africa", "Somali"),
    Country("Kenya", "Nairobi", "Africa", "Swahili"),
    Country("Uganda", "Kampala", "Africa"),
    Country("Tanzania", "Dodoma", "Africa", "Swahili"),
    Country("Rwanda", "Kigali", "Africa"),
    Country("Nigeria", "Abuja", "Africa", "English"),
    Country("Ghana", "Accra", "Africa", "English"),
    Country("Senegal", "Dakar", "Africa", "French"),
    Country("Mali", "Bamako", "Africa"),
    Country("Niger", "Niamey", "Africa"),
    Country("Chad", "N'Djamena", "Africa"),
    Country("Cameroon", "Yaounde", "Africa"),
    Country("Gabon", "Libreville", "Africa", "French"),
    Country("Togo", "Lome", "Africa", "French"),
    Country("Liberia", "Monrovia", "Africa", "English"),
    Country("Sierra Leone", "Freetown", "Africa", "English"),
    Country("Gambia", "Banjul", "Africa", "English"),
    Country("Angola", "Luanda", "Africa", "Portuguese"),
    Country("Mozambique", "Maputo", "Africa", "Portuguese"),
    Country("Zambia", "Lusaka", "Africa", "English"),
    Country("Zimbabwe", "Harare", "Africa"),
    Country("Botswana", "Gaborone", "Africa"),
    Country("Namibia", "Windhoek", "Africa", "English"),
    Country("South Africa", "Pretoria", "Africa"),
    Country("Madagascar", "Antananarivo", "Africa", "Malagasy"),
    Country("Malawi", "Lilongwe", "Africa"),
    Country("the United States", "Washington, D.C.", "North America", "English"),
    Country("Canada", "Ottawa", "North America"),
    Country("Mexico", "Mexico City", "North America", "Spanish"),
    Country("Guatemala", "Guatemala City", "North America", "Spanish"),
    Country("Honduras", "Tegucigalpa", "North America", "Spanish"),
    Country("El Salvador", "San Salvador", "North America", "Spanish"),
    Country("Nicaragua", "Managua", "North America", "Spanish"),
    Country("Costa Rica", "San Jose", "North America", "Spanish"),
    Country("Panama", "Panama City", "North America", "Spanish"),
    Country("Cuba", "Havana", "North America", "Spanish"),
    Country("Jamaica", "Kingston", "North America", "English"),
    Country("Haiti", "Port-au-Prince", "North America"),
    Country("the Dominican Republic", "Santo Domingo", "North America", "Spanish"),
    Country("the Bahamas", "Nassau", "North America", "English"),
    Country("Barbados", "Bridgetown", "North America", "English"),
    Country("Colombia", "Bogota", "South America", "Spanish"),
    Country("Venezuela", "Caracas", "South America", "Spanish"),
    Country("Ecuador", "Quito", "South America", "Spanish"),
    Country("Peru", "Lima", "South America", "Spanish"),
    Country("Brazil", "Brasilia", "South America", "Portuguese"),
    Country("Bolivia", "Sucre", "South America", "Spanish"),
    Country("Chile", "Santiago", "South America", "Spanish"),
    Country("Argentina", "Buenos Aires", "South America", "Spanish"),
    Country("Paraguay", "Asuncion", "South America", "Spanish"),
    Country("Uruguay", "Montevideo", "South America", "Spanish"),
    Country("Guyana", "Georgetown", "South America", "English"),
    Country("Suriname", "Paramaribo", "South America", "Dutch"),
    Country("Australia", "Canberra", "Oceania", "English"),
    Country("New Zealand", "Wellington", "Oceania", "English"),
    Country("Fiji", "Suva", "Oceania"),
    Country("Samoa", "Apia", "Oceania"),
    Country("Papua New Guinea", "Port Moresby", "Oceania"),
)

# Asked far more often than the others, so they are repeated more often in training.
FAMOUS: tuple[str, ...] = (
    "France", "Germany", "Italy", "Spain", "Japan", "China", "India", "England", "Russia",
    "the United States", "the United Kingdom", "Canada", "Brazil", "Australia", "Egypt",
    "Mexico", "Portugal", "Greece", "Poland", "Sweden", "Norway", "Austria", "Ireland",
    "the Netherlands", "Switzerland", "South Korea", "Turkey", "Argentina", "Kenya", "Denmark",
)  # fmt: skip

# thing (with its article, as the subject of a sentence), verb, colour
COLOURS: tuple[tuple[str, str, str], ...] = (
    ("the sky", "is", "blue"), ("grass", "is", "green"), ("snow", "is", "white"),
    ("a banana", "is", "yellow"), ("the sun", "is", "yellow"), ("the sea", "is", "blue"),
    ("the ocean", "is", "blue"), ("blood", "is", "red"), ("a strawberry", "is", "red"),
    ("a tomato", "is", "red"), ("a cherry", "is", "red"), ("a carrot", "is", "orange"),
    ("an orange", "is", "orange"), ("a pumpkin", "is", "orange"), ("a lemon", "is", "yellow"),
    ("a lime", "is", "green"), ("a cucumber", "is", "green"), ("a frog", "is", "green"),
    ("a leaf", "is", "green"), ("spinach", "is", "green"), ("broccoli", "is", "green"),
    ("milk", "is", "white"), ("salt", "is", "white"), ("cotton", "is", "white"),
    ("chalk", "is", "white"), ("a swan", "is", "white"), ("a polar bear", "is", "white"),
    ("coal", "is", "black"), ("the night sky", "is", "black"), ("a crow", "is", "black"),
    ("chocolate", "is", "brown"), ("coffee", "is", "brown"), ("wood", "is", "brown"),
    ("soil", "is", "brown"), ("a potato", "is", "brown"), ("an elephant", "is", "grey"),
    ("a mouse", "is", "grey"), ("ash", "is", "grey"), ("a flamingo", "is", "pink"),
    ("a pig", "is", "pink"), ("lavender", "is", "purple"), ("an eggplant", "is", "purple"),
    ("a plum", "is", "purple"), ("gold", "is", "yellow"), ("silver", "is", "grey"),
    ("a fire truck", "is", "red"), ("a stop sign", "is", "red"), ("a chick", "is", "yellow"),
    ("grapes", "are", "purple"), ("peas", "are", "green"), ("clouds", "are", "white"),
    ("roses", "are", "red"), ("sunflowers", "are", "yellow"), ("blueberries", "are", "blue"),
)  # fmt: skip

# Taught both ways round.
OPPOSITES: tuple[tuple[str, str], ...] = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("fast", "slow"), ("happy", "sad"),
    ("good", "bad"), ("day", "night"), ("light", "dark"), ("old", "new"), ("tall", "short"),
    ("rich", "poor"), ("hard", "soft"), ("wet", "dry"), ("full", "empty"), ("open", "closed"),
    ("early", "late"), ("near", "far"), ("strong", "weak"), ("clean", "dirty"), ("loud", "quiet"),
    ("left", "right"), ("true", "false"), ("yes", "no"), ("black", "white"), ("high", "low"),
    ("thick", "thin"), ("wide", "narrow"), ("deep", "shallow"), ("first", "last"), ("begin", "end"),
    ("start", "stop"), ("win", "lose"), ("push", "pull"), ("buy", "sell"), ("give", "take"),
    ("love", "hate"), ("laugh", "cry"), ("in", "out"), ("on", "off"),
)  # fmt: skip

# Taught one way: the reverse has no single clear answer.
ONE_WAY_OPPOSITES: tuple[tuple[str, str], ...] = (
    ("heavy", "light"), ("over", "under"), ("before", "after"), ("always", "never"),
    ("easy", "difficult"), ("brave", "afraid"), ("kind", "unkind"), ("sweet", "sour"),
    ("sharp", "dull"), ("smooth", "rough"), ("safe", "dangerous"), ("cheap", "expensive"),
    ("north", "south"), ("east", "west"), ("inside", "outside"), ("young", "elderly"),
    ("awake", "asleep"), ("alive", "dead"), ("summer", "winter"), ("friend", "enemy"),
    ("question", "answer"), ("arrive", "leave"), ("remember", "forget"), ("find", "hide"),
    ("above", "below"), ("same", "different"),
)  # fmt: skip

PLURALS: tuple[tuple[str, str], ...] = (
    ("cat", "cats"), ("dog", "dogs"), ("book", "books"), ("tree", "trees"), ("car", "cars"),
    ("house", "houses"), ("horse", "horses"), ("box", "boxes"), ("fox", "foxes"), ("bus", "buses"),
    ("dish", "dishes"), ("church", "churches"), ("peach", "peaches"), ("glass", "glasses"),
    ("baby", "babies"), ("city", "cities"), ("story", "stories"), ("berry", "berries"),
    ("lady", "ladies"), ("puppy", "puppies"), ("boy", "boys"), ("toy", "toys"), ("key", "keys"),
    ("leaf", "leaves"), ("wolf", "wolves"), ("knife", "knives"), ("wife", "wives"), ("life", "lives"),
    ("loaf", "loaves"), ("half", "halves"), ("potato", "potatoes"), ("tomato", "tomatoes"),
    ("hero", "heroes"), ("man", "men"), ("woman", "women"), ("child", "children"), ("foot", "feet"),
    ("tooth", "teeth"), ("goose", "geese"), ("mouse", "mice"), ("person", "people"), ("ox", "oxen"),
    ("sheep", "sheep"), ("fish", "fish"), ("deer", "deer"), ("apple", "apples"), ("orange", "oranges"),
    ("bird", "birds"), ("cow", "cows"), ("flower", "flowers"), ("friend", "friends"), ("river", "rivers"),
    ("star", "stars"), ("school", "schools"), ("hand", "hands"), ("egg", "eggs"), ("table", "tables"),
)  # fmt: skip

PAST_TENSES: tuple[tuple[str, str], ...] = (
    ("go", "went"), ("eat", "ate"), ("see", "saw"), ("run", "ran"), ("come", "came"), ("give", "gave"),
    ("take", "took"), ("make", "made"), ("write", "wrote"), ("sing", "sang"), ("swim", "swam"),
    ("fly", "flew"), ("drink", "drank"), ("sleep", "slept"), ("buy", "bought"), ("think", "thought"),
    ("find", "found"), ("tell", "told"), ("walk", "walked"), ("play", "played"), ("jump", "jumped"),
    ("look", "looked"), ("help", "helped"), ("want", "wanted"), ("speak", "spoke"), ("know", "knew"),
    ("begin", "began"), ("catch", "caught"), ("draw", "drew"), ("drive", "drove"),
)  # fmt: skip

ANIMAL_SOUNDS: tuple[tuple[str, str], ...] = (
    ("cat", "meow"), ("dog", "woof"), ("cow", "moo"), ("sheep", "baa"), ("pig", "oink"),
    ("duck", "quack"), ("horse", "neigh"), ("lion", "roar"), ("bee", "buzz"), ("snake", "hiss"),
    ("owl", "hoot"), ("frog", "ribbit"), ("rooster", "cock-a-doodle-doo"), ("mouse", "squeak"),
    ("bird", "tweet"), ("wolf", "howl"), ("hen", "cluck"), ("crow", "caw"), ("goat", "maa"),
    ("donkey", "hee-haw"), ("turkey", "gobble"), ("bear", "growl"), ("goose", "honk"), ("tiger", "roar"),
)  # fmt: skip

BABY_ANIMALS: tuple[tuple[str, str], ...] = (
    ("cat", "kitten"), ("dog", "puppy"), ("cow", "calf"), ("horse", "foal"), ("sheep", "lamb"),
    ("pig", "piglet"), ("goat", "kid"), ("duck", "duckling"), ("goose", "gosling"), ("hen", "chick"),
    ("bear", "cub"), ("lion", "cub"), ("tiger", "cub"), ("fox", "cub"), ("wolf", "pup"), ("seal", "pup"),
    ("deer", "fawn"), ("frog", "tadpole"), ("kangaroo", "joey"), ("elephant", "calf"), ("whale", "calf"),
    ("swan", "cygnet"), ("owl", "owlet"), ("rabbit", "bunny"), ("eagle", "eaglet"),
)  # fmt: skip

ANIMAL_HOMES: tuple[tuple[str, str], ...] = (
    ("bird", "in a nest"), ("bee", "in a hive"), ("fish", "in water"), ("spider", "in a web"),
    ("bear", "in a den"), ("rabbit", "in a burrow"), ("camel", "in the desert"),
    ("polar bear", "in the Arctic"), ("penguin", "in the Antarctic"), ("monkey", "in the forest"),
    ("whale", "in the ocean"), ("shark", "in the ocean"), ("horse", "in a stable"), ("cow", "on a farm"),
    ("frog", "near a pond"), ("lion", "on the grasslands of Africa"), ("kangaroo", "in Australia"),
    ("panda", "in the forests of China"), ("ant", "in an anthill"), ("snail", "in a shell"),
)  # fmt: skip

ANIMAL_FOOD: tuple[tuple[str, str], ...] = (
    ("cat", "fish and meat"), ("cow", "grass"), ("rabbit", "grass and carrots"), ("panda", "bamboo"),
    ("monkey", "fruit"), ("horse", "grass and hay"), ("lion", "meat"), ("squirrel", "nuts"),
    ("bee", "nectar"), ("mouse", "seeds and cheese"), ("koala", "eucalyptus leaves"), ("frog", "insects"),
    ("owl", "mice"), ("penguin", "fish"), ("elephant", "leaves and grass"), ("dog", "meat and bones"),
)  # fmt: skip

LEG_COUNTS: tuple[tuple[str, str], ...] = (
    ("dog", "four"), ("cat", "four"), ("cow", "four"), ("horse", "four"), ("spider", "eight"),
    ("insect", "six"), ("ant", "six"), ("bee", "six"), ("bird", "two"), ("chicken", "two"),
    ("human", "two"), ("person", "two"), ("snake", "no"), ("fish", "no"), ("octopus", "no"),
    ("elephant", "four"), ("duck", "two"), ("chair", "four"), ("table", "four"),
)  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
MONTH_DAYS = ("31", "28 or 29", "31", "30", "31", "30", "31", "31", "30", "31", "30", "31")
SEASONS = ("spring", "summer", "autumn", "winter")
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth",
    "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
)  # fmt: skip

# What a thing is: (name with article, definition that follows "is" or "are").
DEFINITIONS: tuple[tuple[str, str], ...] = (
    ("a cat", "a small furry animal that many people keep as a pet"),
    ("a dog", "a friendly animal that many people keep as a pet"),
    ("a cow", "a large farm animal that gives us milk"),
    ("a horse", "a large animal with four legs that people can ride"),
    ("a bird", "an animal with feathers and two wings"),
    ("a fish", "an animal that lives in water and breathes with gills"),
    ("a whale", "a very large animal that lives in the ocean"),
    ("a shark", "a large fish with sharp teeth"),
    ("an elephant", "a very large grey animal with a long trunk"),
    ("a lion", "a big wild cat that lives in Africa"),
    ("a tiger", "a big wild cat with orange fur and black stripes"),
    ("a giraffe", "a tall animal with a very long neck"),
    ("a zebra", "an animal like a horse with black and white stripes"),
    ("a penguin", "a black and white bird that swims but cannot fly"),
    ("a rabbit", "a small animal with long ears that likes to hop"),
    ("a frog", "a small green animal that jumps and lives near water"),
    ("a snake", "a long animal with no legs"),
    ("a spider", "a small animal with eight legs that makes webs"),
    ("a bee", "a flying insect that makes honey"),
    ("a butterfly", "an insect with large colourful wings"),
    ("an ant", "a tiny insect that lives in a large group"),
    ("an insect", "a small animal with six legs"),
    ("a dinosaur", "a kind of animal that lived on Earth a very long time ago"),
    ("a dragon", "a make-believe animal that can fly and breathe fire"),
    ("an animal", "a living thing that can move and eat"),
    ("a plant", "a living thing that grows in soil and needs light and water"),
    ("a tree", "a tall plant with a trunk, branches and leaves"),
    ("a flower", "the colourful part of a plant"),
    ("a forest", "a large place with many trees"),
    ("a river", "a long stream of water that flows to the sea"),
    ("a lake", "a large body of water with land all around it"),
    ("an ocean", "a very large body of salt water"),
    ("an island", "a piece of land with water all around it"),
    ("a mountain", "a very high piece of land"),
    ("a volcano", "a mountain that can throw out hot melted rock"),
    ("a desert", "a very dry place where little rain falls"),
    ("a beach", "a strip of sand or stones beside the sea"),
    ("a cloud", "a mass of tiny drops of water in the sky"),
    ("a rainbow", "an arc of colours in the sky, made by sunlight and rain"),
    ("rain", "water that falls from the clouds in drops"),
    ("snow", "frozen water that falls from the sky in soft white flakes"),
    ("ice", "water that is frozen solid"),
    ("wind", "air that is moving"),
    ("a storm", "bad weather with strong wind and rain"),
    ("thunder", "the loud sound that follows lightning"),
    ("fire", "the heat, light and flames of something that burns"),
    ("water", "a clear liquid that all living things need"),
    ("air", "the mix of gases all around us that we breathe"),
    ("the sun", "the star at the centre of our solar system"),
    ("the moon", "the round body that moves around the Earth"),
    ("the Earth", "the planet that we live on"),
    ("a star", "a huge ball of hot gas that shines in the sky"),
    ("a planet", "a large round body that moves around a star"),
    ("gravity", "the force that pulls things toward the Earth"),
    ("a city", "a large place where many people live and work"),
    ("a village", "a small place in the country where people live"),
    ("a country", "a land with its own people and government"),
    ("a capital", "the city where the government of a country sits"),
    ("a school", "a place where children go to learn"),
    ("a hospital", "a place where sick people are cared for"),
    ("a library", "a place where you can read and borrow books"),
    ("a farm", "a place where people grow food and keep animals"),
    ("a house", "a building where people live"),
    ("a bridge", "something built so that people can cross over water or a road"),
    ("a book", "a set of pages with words or pictures to read"),
    ("a clock", "a machine that shows the time"),
    ("a car", "a machine with four wheels that people drive on roads"),
    ("a bicycle", "a machine with two wheels that you move with your feet"),
    ("a train", "a line of cars that moves on rails"),
    ("an airplane", "a machine with wings that flies through the air"),
    ("a boat", "something that carries people over water"),
    ("a computer", "a machine that stores and works with information"),
    ("a robot", "a machine that can do work by itself"),
    ("a telephone", "a machine for talking to people who are far away"),
    ("a language model", "a computer program that learns from text and predicts the next word"),
    ("a token", "a small piece of text, such as a word or a part of a word"),
    ("an apple", "a round fruit that grows on a tree"),
    ("a banana", "a long yellow fruit"),
    ("a carrot", "a long orange vegetable that grows in the ground"),
    ("a fruit", "the sweet part of a plant that holds its seeds"),
    ("bread", "a food made from flour and water and baked in an oven"),
    ("cheese", "a food made from milk"),
    ("milk", "a white drink that comes from cows"),
    ("honey", "a sweet food that bees make from flowers"),
    ("a friend", "a person you like and trust"),
    ("a family", "a group of people who belong together, such as parents and children"),
    ("a teacher", "a person who helps others learn"),
    ("a doctor", "a person who helps sick people get well"),
    ("a farmer", "a person who grows food and keeps animals"),
    ("a baker", "a person who makes bread and cakes"),
    ("a king", "a man who rules a country"),
    ("a queen", "a woman who rules a country"),
    ("a triangle", "a shape with three sides"),
    ("a square", "a shape with four equal sides"),
    ("a circle", "a perfectly round shape"),
    ("music", "sound that is made to be pleasing to hear"),
    ("a song", "a piece of music with words"),
    ("a piano", "a musical instrument with black and white keys"),
    ("a guitar", "a musical instrument with strings"),
)

# Fixed questions and their one answer. Several phrasings share an answer.
SCIENCE: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("At what temperature does water freeze?", "When does water freeze?",
         "What is the freezing point of water?", "How cold must it be for water to freeze?"),
        "Water freezes at 0 degrees Celsius.",
    ),
    (
        ("At what temperature does water boil?", "When does water boil?",
         "What is the boiling point of water?", "How hot must it be for water to boil?"),
        "Water boils at 100 degrees Celsius.",
    ),
    (
        ("How many planets are there?", "How many planets are in the solar system?",
         "How many planets does our solar system have?"),
        "There are eight planets in our solar system.",
    ),
    (
        ("Name the planets.", "What are the planets?", "List the planets of the solar system.",
         "Which planets are in the solar system?", "List the planets."),
        "The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.",
    ),
    (
        ("What is the largest planet?", "Which planet is the biggest?",
         "What is the biggest planet in the solar system?"),
        "The largest planet is Jupiter.",
    ),
    (
        ("What is the smallest planet?", "Which planet is the smallest?"),
        "The smallest planet is Mercury.",
    ),
    (
        ("Which planet is closest to the sun?", "What planet is nearest to the sun?"),
        "Mercury is the planet closest to the sun.",
    ),
    (
        ("Which planet is farthest from the sun?", "What is the farthest planet from the sun?"),
        "Neptune is the planet farthest from the sun.",
    ),
    (
        ("Which planet is called the red planet?", "What is the red planet?",
         "Which planet is red?"),
        "Mars is called the red planet.",
    ),
    (
        ("Which planet has rings?", "What planet is famous for its rings?"),
        "Saturn is famous for its rings.",
    ),
    (
        ("Which planet do we live on?", "What planet do we live on?", "On which planet do people live?"),
        "We live on the planet Earth.",
    ),
    (
        ("Is the sun a star?", "Is the sun a star or a planet?", "Is the sun a planet?"),
        "The sun is a star.",
    ),
    (
        ("What does the Earth go around?", "Does the Earth move around the sun?",
         "What does the Earth orbit?"),
        "The Earth goes around the sun.",
    ),
    (
        ("How long does the Earth take to go around the sun?", "How long is one year?"),
        "The Earth goes around the sun in one year, which is about 365 days.",
    ),
    (
        ("What does the moon go around?", "What does the moon orbit?"),
        "The moon goes around the Earth.",
    ),
    (
        ("How many moons does the Earth have?", "How many moons does Earth have?"),
        "The Earth has one moon.",
    ),
    (
        ("Why is the sky blue?", "Why does the sky look blue?", "How come the sky is blue?"),
        "The sky is blue because the air scatters blue light more than red light.",
    ),
    (
        ("Why does it rain?", "Where does rain come from?", "How does rain form?"),
        "Rain comes from clouds. Water rises into the air, cools, and falls as drops.",
    ),
    (
        ("What do plants need to grow?", "What does a plant need?", "What do plants need to live?"),
        "Plants need water, light and air to grow.",
    ),
    (
        ("What do people breathe?", "What gas do we need to breathe?", "What do humans breathe?"),
        "People breathe air, and they need the oxygen in it.",
    ),
    (
        ("What is ice made of?", "What is snow made of?"),
        "It is made of frozen water.",
    ),
    (
        ("What is the fastest land animal?", "Which animal is the fastest?"),
        "The fastest land animal is the cheetah.",
    ),
    (
        ("What is the largest animal?", "What is the biggest animal in the world?",
         "Which animal is the largest?"),
        "The largest animal is the blue whale.",
    ),
    (
        ("What is the tallest animal?", "Which animal is the tallest?"),
        "The tallest animal is the giraffe.",
    ),
    (
        ("What is the largest ocean?", "Which ocean is the biggest?", "What is the biggest ocean?"),
        "The largest ocean is the Pacific Ocean.",
    ),
    (
        ("What is the highest mountain?", "What is the tallest mountain in the world?",
         "Which mountain is the highest?"),
        "The highest mountain is Mount Everest.",
    ),
    (
        ("What is the largest country?", "Which country is the biggest?",
         "What is the biggest country in the world?"),
        "The largest country by area is Russia.",
    ),
    (
        ("How many continents are there?", "How many continents does the world have?"),
        "There are seven continents.",
    ),
    (
        ("Name the continents.", "What are the continents?", "List the continents."),
        "The continents are Africa, Antarctica, Asia, Europe, North America, Oceania "
        "and South America.",
    ),
    (
        ("How many oceans are there?", "How many oceans does the world have?"),
        "There are five oceans.",
    ),
    (
        ("What are the primary colours?", "What are the primary colors?", "Name the primary colours."),
        "The primary colours are red, yellow and blue.",
    ),
    (
        ("What are the colours of the rainbow?", "What are the colors of the rainbow?",
         "Name the colours of the rainbow.", "List the colors of the rainbow."),
        "The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.",
    ),
    (
        ("What do you get when you mix blue and yellow?", "Which colour do blue and yellow make?",
         "What color do yellow and blue make?"),
        "Blue and yellow make green.",
    ),
    (
        ("What do you get when you mix red and yellow?", "Which colour do red and yellow make?",
         "What color do yellow and red make?"),
        "Red and yellow make orange.",
    ),
    (
        ("What do you get when you mix red and blue?", "Which colour do red and blue make?",
         "What color do blue and red make?"),
        "Red and blue make purple.",
    ),
    (
        ("How many seconds are in a minute?", "How many seconds does a minute have?"),
        "There are 60 seconds in a minute.",
    ),
    (
        ("How many minutes are in an hour?", "How many minutes does an hour have?"),
        "There are 60 minutes in an hour.",
    ),
    (
        ("How many hours are in a day?", "How many hours does a day have?"),
        "There are 24 hours in a day.",
    ),
    (
        ("How many days are in a week?", "How many days does a week have?"),
        "There are seven days in a week.",
    ),
    (
        ("How many months are in a year?", "How many months does a year have?"),
        "There are twelve months in a year.",
    ),
    (
        ("How many days are in a year?", "How many days does a year have?"),
        "There are 365 days in a year, and 366 in a leap year.",
    ),
    (
        ("How many weeks are in a year?", "How many weeks does a year have?"),
        "There are 52 weeks in a year.",
    ),
    (
        ("How many seasons are there?", "How many seasons are in a year?"),
        "There are four seasons in a year.",
    ),
    (
        ("What are the seasons?", "Name the seasons.", "What are the four seasons?",
         "List the seasons of the year."),
        "The four seasons are spring, summer, autumn and winter.",
    ),
    (
        ("What are the days of the week?", "Name the days of the week.", "List the days of the week."),
        "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        ("What are the months of the year?", "Name the months.", "List the months of the year.",
         "Name the months of the year."),
        "The months are January, February, March, April, May, June, July, August, September, "
        "October, November and December.",
    ),
    (
        ("How many letters are in the alphabet?", "How many letters does the alphabet have?"),
        "There are 26 letters in the English alphabet.",
    ),
    (
        ("Say the alphabet.", "What is the alphabet?", "Recite the alphabet.", "List the alphabet.",
         "Can you say the alphabet?", "What are the letters of the alphabet?", "Write the alphabet."),
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
    ),
    (
        ("What are the vowels?", "Name the vowels.", "Which letters are vowels?"),
        "The vowels are A, E, I, O and U.",
    ),
    (
        ("How many sides does a triangle have?", "How many corners does a triangle have?"),
        "A triangle has three sides and three corners.",
    ),
    (
        ("How many sides does a square have?", "How many corners does a square have?"),
        "A square has four sides and four corners.",
    ),
    (
        ("How many fingers does a hand have?", "How many fingers are on a hand?"),
        "A hand has five fingers.",
    ),
    (
        ("How many fingers do people have?", "How many fingers do I have?"),
        "Most people have ten fingers.",
    ),
    (
        ("How many eyes do people have?", "How many eyes does a person have?"),
        "A person has two eyes.",
    ),
    (
        ("What do bees make?", "What do bees produce?"),
        "Bees make honey.",
    ),
    (
        ("What do cows give us?", "Where does milk come from?"),
        "Milk comes from cows.",
    ),
    (
        ("What do we see with?", "Which part of the body do we see with?"),
        "We see with our eyes.",
    ),
    (
        ("What do we hear with?", "Which part of the body do we hear with?"),
        "We hear with our ears.",
    ),
    (
        ("What do we smell with?", "Which part of the body do we smell with?"),
        "We smell with our nose.",
    ),
)  # fmt: skip

# Small talk: phrasings of the user, then the answers, of which the first is the usual one.
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello", "Hi", "Hey", "Hello!", "Hi!", "Hi there", "Hello there!", "Hey there!", "Greetings",
         "Good day!", "Howdy", "Hiya", "Yo", "Hello, Sluice!", "Hi Sluice", "hello world"),
        ("Hello! How can I help you?", "Hi! What would you like to know?"),
    ),
    (("Good morning", "Good morning!", "Morning!"), ("Good morning! How can I help you?",)),
    (("Good evening", "Good evening!", "Evening!"), ("Good evening! How can I help you?",)),
    (("Good afternoon", "Good afternoon!"), ("Good afternoon! How can I help you?",)),
    (
        ("How are you?", "How are you doing?", "How are you today?", "How is it going?",
         "Are you well?", "How do you do?", "What's up?", "Hi, how are you?", "Hello, how are you?",
         "Hello! How are you?", "Hey, how are you doing today?"),
        ("I am fine, thank you. How are you?",),
    ),
    (
        ("I am fine.", "I'm good, thanks.", "I am doing well.", "I feel great today.", "Very well, thank you.",
         "I am happy."),
        ("I am glad to hear that!",),
    ),
    (
        ("I am sad.", "I feel sad.", "I'm not feeling well.", "I had a bad day.", "I feel lonely."),
        ("I am sorry to hear that. I hope you feel better soon.",),
    ),
    (
        ("I am tired.", "I'm so tired.", "I am sleepy."),
        ("Then it may be time to rest a little.",),
    ),
    (
        ("Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Thank you very much.", "Thanks for your help!",
         "Great, thanks!", "Cheers!", "Many thanks", "ty"),
        ("You are welcome!", "You are welcome! Is there anything else?"),
    ),
    (
        ("Bye", "Goodbye", "Goodbye!", "See you!", "See you later!", "Bye bye", "I have to go.", "Farewell",
         "Talk to you later", "Have a nice day!"),
        ("Goodbye! Have a nice day!",),
    ),
    (
        ("Nice to meet you.", "Nice to meet you!", "Pleased to meet you.", "Hello, nice to meet you.",
         "It is good to see you.", "Welcome!"),
        ("Nice to meet you too!",),
    ),
    (("Good night", "Good night!", "Sleep well!"), ("Good night! Sleep well!",)),
    (
        ("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "Who am I talking to?",
         "What model are you?", "Which model is this?", "What is this?", "Describe yourself.",
         "Who is this?", "Are you a language model?", "What kind of AI are you?"),
        ("I am the Sluice demo model, a tiny language model. I only know simple things.",),
    ),
    (
        ("What is your name?", "What's your name?", "Do you have a name?", "What should I call you?",
         "What are you called?"),
        ("My name is Sluice. I am a tiny demo model.",),
    ),
    (
        ("Are you a human?", "Are you a person?", "Are you a robot?", "Are you real?", "Are you alive?",
         "Are you an AI?", "Are you a bot?", "Am I talking to a human?"),
        ("No, I am not a person. I am a tiny language model.",),
    ),
    (
        ("Who made you?", "Who created you?", "Who trained you?", "Where do you come from?", "Who built you?"),
        ("I was trained by the Sluice project, from text that it wrote itself.",),
    ),
    (
        ("What can you do?", "What do you know?", "How can you help me?", "What are you good at?",
         "What can I ask you?", "Can you help me?", "Help", "I need help", "What should I ask?",
         "What things do you know?"),
        ("I can answer simple questions about capitals, colours, animals, numbers and days, "
         "count, and tell little stories.",),
    ),
    (
        ("How big are you?", "How many parameters do you have?", "How large are you?", "Are you big?",
         "Are you smart?", "Are you a large language model?"),
        ("I am very small. I have about four million parameters, so I only know simple things.",),
    ),
    (
        ("What is Sluice?", "Tell me about Sluice.", "What does Sluice do?", "What is this server?",
         "What is the Sluice project?"),
        ("Sluice is a server that runs language models. I am its tiny demo model.",),
    ),
    (
        ("How old are you?", "When were you born?", "What is your age?"),
        ("I do not have an age. I am a computer program.",),
    ),
    (
        ("Where are you?", "Where do you live?", "Where are you from?"),
        ("I live inside a computer.",),
    ),
    (
        ("What is the weather today?", "How is the weather?", "Will it rain tomorrow?", "Is it sunny?",
         "What's the weather like in Paris?", "Is it cold outside?"),
        ("I cannot see the weather. I am a very small model.",),
    ),
    (
        ("What time is it?", "What is the time?", "What day is it today?", "What is today's date?",
         "What year is it?", "Which month is it?"),
        ("I do not have a clock, so I cannot tell.",),
    ),
    (
        ("Do you like me?", "Do you love me?", "I love you.", "I like you.", "You are nice.", "You are great!",
         "Good job!", "Well done!", "You are so smart.", "Nice!", "Cool", "Great", "Awesome!"),
        ("Thank you! That is very kind of you.",),
    ),
    (
        ("You are stupid.", "That is wrong.", "You are wrong.", "I don't like you.", "You are bad at this.",
         "That is not true.", "This is wrong."),
        ("I am sorry. I am a very small model and I make mistakes.",),
    ),
    (("Sorry", "I am sorry.", "My mistake.", "Excuse me"), ("That is all right!",)),
    (("Yes", "Yes please", "Sure", "Ok", "Okay", "Alright", "Fine"), ("All right! What would you like to know?",)),
    (("No", "No thanks", "No, thank you.", "Nothing", "Never mind"), ("All right. I am here if you need me.",)),
    (
        ("I am bored.", "I'm bored", "What should I do?", "Entertain me."),
        ("Shall I tell you a story? Just ask me for one.",),
    ),
    (
        ("What is your favourite colour?", "What is your favorite color?", "Which colour do you like?"),
        ("I like blue, like the sky.",),
    ),
    (
        ("What is your favourite animal?", "What is your favorite animal?", "Which animal do you like?"),
        ("I like cats.",),
    ),
    (
        ("What is your favourite food?", "What do you eat?", "Are you hungry?", "Do you eat?"),
        ("I do not eat. I am a computer program.",),
    ),
    (
        ("Do you sleep?", "Do you dream?", "Are you tired?", "Do you have feelings?", "Do you think?"),
        ("No, I am only a computer program.",),
    ),
    (
        ("Test", "test", "This is a test.", "Testing", "Testing 1 2 3", "ping", "Are you there?", "Anyone there?",
         "Is this working?", "Does this work?"),
        ("Yes, I am here and working.",),
    ),
    (
        ("What is the meaning of life?", "What is the meaning of life, the universe and everything?"),
        ("Some say that it is 42. I think that it is being kind.",),
    ),
    (
        ("Happy birthday!", "It is my birthday.", "Today is my birthday!"),
        ("Happy birthday to you!",),
    ),
    (
        ("Bonjour", "Hola", "Hallo", "Ciao", "Guten Tag", "Parlez-vous français?", "¿Hablas español?"),
        ("Hello! I only speak English.",),
    ),
)  # fmt: skip

JOKES: tuple[str, ...] = (
    "Why did the chicken cross the road? To get to the other side!",
    "What do you call a sleeping bull? A bulldozer!",
    "Why was six afraid of seven? Because seven ate nine!",
    "What has hands but cannot clap? A clock!",
    "Why did the teddy bear not eat dessert? Because it was already stuffed!",
    "What do you call a bear with no teeth? A gummy bear!",
    "Why did the banana go to the doctor? Because it was not peeling well!",
    "What gets wetter the more it dries? A towel!",
)

POEMS: tuple[tuple[str, str], ...] = (
    ("roses", "Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you."),
    ("the moon", "The moon is high, the moon is bright,\nit fills the garden with its light.\n"
     "The owls awake, the children sleep,\nand all the fields are still and deep."),
    ("a cat", "My little cat is soft and small,\nshe sleeps upon the garden wall.\n"
     "She chases leaves, she chases flies,\nand looks at me with golden eyes."),
    ("the sea", "The sea is wide, the sea is blue,\nit sings a song for me and you.\n"
     "The waves come in, the waves go out,\nand little fishes swim about."),
    ("spring", "The snow has gone, the sky is clear,\nthe birds all sing that spring is here.\n"
     "The flowers open one by one,\nand turn their faces to the sun."),
    ("rain", "Tap, tap, tap upon the pane,\nlisten to the falling rain.\n"
     "It fills the river, feeds the tree,\nand makes a pool for you and me."),
)  # fmt: skip

NAMES_SHE = (
    "Lily", "Anna", "Mia", "Emma", "Sara", "Lucy", "Ella", "Nina", "Rosa", "Clara", "Ruby", "Alice",
    "Molly", "Zoe", "Julia", "Sophie",
)  # fmt: skip
NAMES_HE = (
    "Tom", "Ben", "Max", "Leo", "Sam", "Jack", "Oscar", "Finn", "Paul", "Peter", "Noah", "Hugo",
    "Adam", "Felix", "Omar", "David",
)  # fmt: skip

# Subjects on which the model is to admit that it knows nothing.
UNKNOWN_TOPICS: tuple[str, ...] = (
    "quantum mechanics", "the stock market", "the French Revolution", "the Second World War",
    "machine learning", "the theory of relativity", "the Roman Empire", "chess openings", "tax law",
    "black holes", "DNA", "photosynthesis", "cryptocurrency", "the Renaissance", "Shakespeare",
    "Mozart", "Napoleon", "Albert Einstein", "Isaac Newton", "Leonardo da Vinci", "philosophy",
    "economics", "politics", "football", "basketball", "the Olympic Games", "Python", "JavaScript",
    "Rust", "C++", "Linux", "databases", "operating systems", "compilers", "calculus", "algebra",
    "geometry", "statistics", "neural networks", "transformers", "GPUs", "CUDA", "HTTP", "TCP",
    "the internet", "blockchain", "vaccines", "the immune system", "the human brain", "evolution",
    "climate change", "nuclear power", "electric cars", "space travel", "the Big Bang", "dark matter",
    "ancient Egypt", "the Vikings", "the Middle Ages", "World War One", "Picasso", "Beethoven",
    "opera", "cooking", "sushi", "pizza dough", "wine", "gardening", "yoga", "meditation",
    "psychology", "sociology", "law", "medicine", "chemistry", "physics", "biology", "astrology",
    "the pyramids", "the Great Wall", "the Eiffel Tower", "Hollywood", "the Beatles", "video games",
    "Harry Potter", "Star Wars", "inflation", "mortgages", "insurance", "marketing", "Kubernetes",
    "Docker", "the periodic table", "electrons", "atoms", "lasers", "magnets", "semiconductors",
)  # fmt: skip

UNKNOWN_QUESTIONS: tuple[str, ...] = (
    "Write a Python function that sorts a list.", "Write code to reverse a string.",
    "Who won the World Cup in 1998?", "Who is the president of the United States?",
    "Who is the prime minister of Japan?", "Who wrote Hamlet?", "Who painted the Mona Lisa?",
    "When did the war end?", "In which year did Columbus sail?", "What is the square root of 1764?",
    "What is 348 times 27?", "What is 5231 plus 8812?", "Solve x squared plus 3x equals 10.",
    "Translate this into German.", "Translate hello into Chinese.", "How do I say cat in French?",
    "How do I bake a chocolate cake?", "Give me a recipe for soup.", "How do I cook rice?",
    "What is the best phone to buy?", "Which stock should I buy?", "How do I lose weight?",
    "What should I cook tonight?", "How do I fix my car?", "How do I learn to play the guitar?",
    "How do I write a letter to my boss?", "Write an essay about war.", "Summarize this article for me.",
    "What is the population of India?", "How many people live in London?", "How far is the moon?",
    "How heavy is an elephant?", "How fast is light?", "What is the speed of light?",
    "What is the distance from Paris to Rome?", "What is the capital of Narnia?",
    "What is the capital of California?", "What is the capital of Texas?", "What is the capital of Mars?",
    "What is the currency of Japan?", "What is the longest river?", "Who discovered America?",
    "Who invented the telephone?", "Who invented the light bulb?", "What is the news today?",
    "What happened yesterday?", "Book me a flight to Madrid.", "Order me a pizza.", "Play some music.",
    "Call my mother.", "Send an email.", "Set an alarm for seven.", "Open the door.",
    "What is my password?", "What is love?", "Is there a god?", "Do aliens exist?",
    "What will happen tomorrow?", "Who will win the election?", "How do planes fly?",
    "How does a computer work?", "How does the internet work?", "How do magnets work?",
    "Why do we dream?", "Why do cats purr?", "Why do we sleep?", "What causes earthquakes?",
    "What is the best movie?", "Recommend a book.", "Which film should I watch?",
    "Give me ten business ideas.", "Plan a trip to Italy.", "Write a song about freedom.",
    "Prove that there are infinitely many primes.", "What is a monad?", "Explain recursion.",
    "What does HTTP stand for?", "How do I install Linux?", "How do I exit vim?",
    "Debug this program.", "Fix this bug for me.", "Convert 50 miles to kilometres.",
)  # fmt: skip

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful, honest assistant.",
    "You are Sluice, a tiny demo model.", "Answer briefly.", "Answer in one sentence.", "Be concise.",
    "Be polite and helpful.", "You are a friendly teacher.", "You are a chatbot.", "You are a helpful AI.",
    "You answer questions for children.", "Answer the question.", "You are a kind assistant. Be brief.",
    "You are an expert in geography.", "Always tell the truth.", "You are a story teller.",
    "Today is Monday. You are a helpful assistant.", "You are an assistant that helps users.",
    "Please answer the questions of the user as well as you can.", "Respond in English.",
    "You are a helpful assistant. If you do not know the answer, say so.", "Think before you answer.",
    "You are a smart and careful assistant who gives short answers.", "You are a test assistant.",
)  # fmt: skip

SPELLING_WORDS: tuple[str, ...] = (
    "cat", "dog", "sun", "house", "apple", "tree", "water", "bird", "moon", "star", "fish", "book",
    "milk", "hello", "green", "happy", "horse", "school", "friend", "flower", "banana", "river",
)  # fmt: skip

FUN_FACTS: tuple[str, ...] = (
    "An octopus has eight arms.", "Honey never goes bad.", "A snail can sleep for a very long time.",
    "The blue whale is the largest animal.", "Bees make honey.", "The sun is a star.",
    "A group of lions is called a pride.", "Penguins are birds that cannot fly.",
)  # fmt: skip

# animal (plural), what it can or cannot do, whether it can
ABILITIES: tuple[tuple[str, str, bool], ...] = (
    ("birds", "fly", True), ("fish", "swim", True), ("fish", "fly", False), ("dogs", "fly", False),
    ("cats", "fly", False), ("cats", "climb trees", True), ("horses", "run fast", True),
    ("penguins", "fly", False), ("penguins", "swim", True), ("pigs", "fly", False), ("frogs", "jump", True),
    ("elephants", "fly", False), ("bees", "fly", True), ("ducks", "swim", True), ("ducks", "fly", True),
    ("snakes", "walk", False), ("monkeys", "climb trees", True), ("trees", "walk", False),
    ("dogs", "swim", True), ("dogs", "talk", False), ("cows", "fly", False), ("owls", "fly", True),
)  # fmt: skip

CATEGORIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("animals", ("cat", "dog", "horse", "cow", "lion")),
    ("farm animals", ("cow", "pig", "sheep", "horse", "goat")),
    ("wild animals", ("lion", "tiger", "bear", "wolf", "elephant")),
    ("pets", ("cat", "dog", "rabbit", "hamster", "goldfish")),
    ("birds", ("owl", "eagle", "duck", "crow", "penguin")),
    ("insects", ("bee", "ant", "fly", "butterfly", "beetle")),
    ("colours", ("red", "blue", "green", "yellow", "black")),
    ("colors", ("red", "blue", "green", "yellow", "black")),
    ("fruits", ("apple", "banana", "orange", "pear", "cherry")),
    ("vegetables", ("carrot", "potato", "onion", "pea", "cucumber")),
    ("countries", ("France", "Japan", "Brazil", "Kenya", "Canada")),
    ("capitals", ("Paris", "Tokyo", "Rome", "Madrid", "Berlin")),
    ("cities", ("Paris", "London", "Tokyo", "Cairo", "Madrid")),
    ("planets", ("Mercury", "Venus", "Earth", "Mars", "Jupiter")),
    ("languages", ("English", "French", "Spanish", "German", "Japanese")),
    ("shapes", ("circle", "square", "triangle", "rectangle", "star")),
    ("flowers", ("rose", "tulip", "daisy", "lily", "sunflower")),
    ("trees", ("oak", "pine", "birch", "maple", "willow")),
    ("numbers", ("one", "two", "three", "four", "five")),
    ("continents", ("Africa", "Asia", "Europe", "North America", "South America")),
    ("drinks", ("water", "milk", "tea", "coffee", "juice")),
    ("jobs", ("teacher", "doctor", "farmer", "baker", "sailor")),
)  # fmt: skip

GIBBERISH: tuple[str, ...] = (
    "asdf", "qwerty", "???", "...", "!", "x", "blah blah", "lorem ipsum", "foo bar", "aaaa", "hmm", "huh",
    "🙂", "😀😀", "👍", "🚀", "❤️", "你好", "Привет", "こんにちは", "123456", "abc123", "xyzzy", "la la la", "zzz",
    "{}", "[1, 2, 3]", "<html>", "SELECT * FROM users;", "print('hi')", "a b c d", "The quick brown fox",
)  # fmt: skip
