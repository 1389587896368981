(comment) @comment
(string) @string
(path) @string.special.path
(number) @number
(boolean) @boolean
["let" "model" "define" "include" "recurrence" "loss" "return" "from"] @keyword
["and" "or" "not"] @keyword.operator
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
(define name: (identifier) @type)
(setting name: (identifier) @variable.parameter)
(assignment name: (identifier) @variable)
(state name: (identifier) @variable)
(dimension name: (identifier) @property)
(call function: (identifier) @function)
(named name: (identifier) @property)
["over" "along" "at" "normal" "uniform" "ramp" "log_uniform" "inverse_softplus_uniform"] @keyword
