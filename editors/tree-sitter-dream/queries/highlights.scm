(comment) @comment
(string) @string
(path) @string.special.path
(number) @number
(boolean) @boolean
["let" "model"] @keyword
["repeat" "recur" "layer" "body" "skip"] @keyword.repeat
["=" ">" "|" "+" "-" "*" "/"] @operator
["{" "}" "(" ")" "[" "]"] @punctuation.bracket
"," @punctuation.delimiter
(let name: (identifier) @constant)
(model name: (_) @type)
(definition name: (identifier) @variable kind: (identifier) @type.builtin)
(component) @variable
(key) @property
(pair value: (identifier) @constant.builtin)
(tagged (identifier) @constant.builtin)
