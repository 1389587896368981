"""`dreamc lsp` under a client that others wrote: pytest-lsp (pygls and lsprotocol).

`cargo test --test cli another_client` runs this where `DREAMC_PYTHON` names a Python with pytest-lsp.
"""

import os
import pathlib

import pytest
import pytest_lsp
from lsprotocol import types
from pytest_lsp import ClientServerConfig, LanguageClient, client_capabilities

TEXT = """\
model tiny {
  vocab 256  hidden 16  context 64
  sa = sequence { heads 2 }
  mlp = mlp { intermediate 32 }
  repeat 2 { sa > mlp }
}
"""
URI = "file:///tmp/tiny.dream"


@pytest_lsp.fixture(config=ClientServerConfig(server_command=[os.environ.get("DREAMC", "dreamc"), "lsp"]))
async def client(lsp_client: LanguageClient):
    await lsp_client.initialize_session(
        types.InitializeParams(
            capabilities=client_capabilities("visual-studio-code"),
            root_uri=pathlib.Path("/tmp").as_uri(),
        )
    )
    yield
    await lsp_client.shutdown_session()


async def opened(client, text):
    item = types.TextDocumentItem(uri=URI, language_id="dream", version=1, text=text)
    client.text_document_did_open(types.DidOpenTextDocumentParams(text_document=item))
    await client.wait_for_notification("textDocument/publishDiagnostics")
    return client.diagnostics[URI]


def at(line, character):
    return {
        "text_document": types.TextDocumentIdentifier(uri=URI),
        "position": types.Position(line=line, character=character),
    }


@pytest.mark.asyncio
async def test_diagnostics(client):
    assert not await opened(client, TEXT)
    [found] = await opened(client, TEXT.replace("heads", "haeds").replace("{ haeds 2 }", "{ heads 2  widnow 4 }"))
    assert "window" in found.message and found.range.start.line == 2


@pytest.mark.asyncio
async def test_completion_and_hover(client):
    await opened(client, TEXT)
    items = await client.text_document_completion_async(types.CompletionParams(**at(2, 20)))
    assert {"heads", "rope"} <= {item.label for item in items}
    page = await client.text_document_hover_async(types.HoverParams(**at(4, 13)))
    assert "parameters" in page.contents.value
    page = await client.text_document_hover_async(types.HoverParams(**at(1, 3)))
    assert "Vocabulary size" in page.contents.value


@pytest.mark.asyncio
async def test_definition_rename_and_format(client):
    await opened(client, TEXT)
    place = await client.text_document_definition_async(types.DefinitionParams(**at(4, 13)))
    assert place.range.start.line == 2
    edit = await client.text_document_rename_async(types.RenameParams(new_name="attention", **at(4, 13)))
    assert len(edit.changes[URI]) == 2
    options = types.FormattingOptions(tab_size=2, insert_spaces=True)
    document = types.TextDocumentIdentifier(uri=URI)
    edits = await client.text_document_formatting_async(
        types.DocumentFormattingParams(text_document=document, options=options)
    )
    assert edits and "vocab 256\n" in edits[0].new_text
