// Starts `dreamc lsp` and hands it the files of the language.
const { workspace, window } = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

exports.activate = async () => {
  const settings = workspace.getConfiguration("dreamc");
  const command = settings.get("path") || "dreamc";
  const yaml = settings.get("yaml").map((pattern) => ({ language: "yaml", pattern }));
  client = new LanguageClient(
    "dreamc",
    "dreamc",
    { command, args: ["lsp"] },
    { documentSelector: [{ language: "dream" }, ...yaml] },
  );
  try {
    await client.start();
  } catch (error) {
    window.showWarningMessage(`dreamc: \`${command} lsp\` does not start (${error.message}); set dreamc.path`);
  }
};

exports.deactivate = () => client?.stop();
